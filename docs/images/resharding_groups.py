"""Draws ``resharding_groups.svg`` from the planner itself: ``python docs/images/resharding_groups.py``.

Eight ranks, trained in two replicas of four shards (the paper's 1-4-2), generating with tensor parallelism of two (its
1-2-2-2). One column-parallel weight of 16 rows stands for all.
"""

from __future__ import annotations

from pathlib import Path

from hybridflow.hybrid_engine.boxes import volume
from hybridflow.hybrid_engine.layouts import ModelShapes, TrainingLayout, predict
from hybridflow.hybrid_engine.plan import Slice, plan_rank
from hybridflow.hybrid_engine.rules import Heads
from hybridflow.topology.parallel import ParallelDims

ROWS, WORLD, TP = 16, 8, 2
NAME = "model.layers.0.mlp.up_proj.weight"
WIDTH, HEIGHT, LEFT, STEP, BAR, UNIT = 980, 640, 150, 100, 46, 8
OWNED, NEEDED, GREY, TEXT, MUTED = "#1d4ed8", "#fdba74", "#e2e8f0", "#0f172a", "#64748b"
MOVE = "#c2410c"
ARROW = f'stroke="{MOVE}" stroke-width="1.6" marker-start="url(#tip)" marker-end="url(#tip)"'


def slices_of(layout: TrainingLayout) -> list[Slice]:
    """The one weight under a training layout."""
    model = ModelShapes(
        architecture="Qwen2ForCausalLM",
        shapes={NAME: (ROWS, 1)},
        heads=Heads(query=2, key_value=2, size=1),
        layers=1,
    )
    return predict(model, layout, ParallelDims(dp_shard=WORLD // TP, tp=TP))


def text(
    x: float, y: float, words: str, size: int = 13, fill: str = TEXT, anchor: str = "middle", weight: str = ""
) -> str:
    """An SVG text."""
    bold = f' font-weight="{weight}"' if weight else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"{bold}>{words}</text>'


def rect(x: float, y: float, width: float, height: float, fill: str, stroke: str = "none", extra: str = "") -> str:
    """An SVG rectangle."""
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}" stroke="{stroke}" {extra}/>'


def bar(x: float, y: float, blocks: list[tuple[tuple[int, int], str]]) -> str:
    """A weight as a vertical strip of rows, with coloured ranges."""
    parts = [rect(x, y, BAR, ROWS * UNIT, "#ffffff")]
    parts += [rect(x, y + low * UNIT, BAR, (high - low) * UNIT, fill) for (low, high), fill in blocks]
    parts += [
        f'<line x1="{x}" y1="{y + row * UNIT}" x2="{x + BAR}" y2="{y + row * UNIT}" stroke="#cbd5e1"/>'
        for row in range(0, ROWS + 1, 4)
    ]
    parts.append(rect(x, y, BAR, ROWS * UNIT, "none", "#475569"))
    return "".join(parts)


def panel(top: float, title: str, note: str, layout: TrainingLayout, *, arrows: bool) -> str:
    """What each rank owns (blue) of what it needs (orange), and what it receives."""
    slices = slices_of(layout)
    piece = slices[0]
    parts = [text(24, top, title, 15, anchor="start", weight="bold"), text(24, top + 20, note, 13, MUTED, "start")]
    y = top + 40
    for rank in range(WORLD):
        x = LEFT + rank * STEP
        owned, needed = piece.owned[rank], piece.needed[rank]
        assert owned is not None
        assert needed is not None
        plan = plan_rank(slices, rank)
        parts.append(bar(x, y, [(needed[0], NEEDED), (owned[0], OWNED)]))
        received = sum(volume(move.box) for group in plan.groups for move in group.receives)
        parts.append(text(x + BAR / 2, y + ROWS * UNIT + 18, f"{received} rows", 13, MOVE if received > 4 else TEXT))
    parts.append(text(24, y + ROWS * UNIT + 18, "receives", 13, MUTED, "start"))
    if arrows:
        for rank in (0, 1, 4, 5):
            x = LEFT + rank * STEP + BAR
            at = y + (2 + 8 * (rank % 2)) * UNIT + 14
            end = x + 2 * STEP - BAR
            curve = f"M{x + 4},{at} C{x + 40},{at - 16} {end - 40},{at - 16} {end - 4},{at}"
            parts.append(f'<path d="{curve}" fill="none" {ARROW}/>')
    return "".join(parts)


def picture() -> str:
    """The whole figure."""
    dims = ParallelDims(dp_replicate=2, dp_shard=4)
    head = [
        text(
            24,
            30,
            "8 ranks: two replicas of four shards train, tensor parallel pairs generate",
            17,
            anchor="start",
            weight="bold",
        )
    ]
    for rank in range(WORLD):
        head.append(text(LEFT + rank * STEP + BAR / 2, 66, f"rank {rank}", 14, weight="bold"))
        head.append(text(LEFT + rank * STEP + BAR / 2, 84, f"tp {rank % TP}", 12, MUTED))
    for pair in range(WORLD // TP):
        x = LEFT + pair * 2 * STEP - 14
        head.append(rect(x, 48, STEP + BAR + 28, 44, "none", "#94a3b8", 'rx="8"'))
    head.append(text(24, 74, "one vLLM engine", 12, MUTED, "start"))
    legend_y = 616
    legend = [
        rect(150, legend_y - 12, 18, 14, OWNED),
        text(176, legend_y, "owned by the trainer on this rank", 13, anchor="start"),
        rect(420, legend_y - 12, 18, 14, NEEDED),
        text(446, legend_y, "needed by the generator and not owned", 13, anchor="start"),
        f'<line x1="720" y1="{legend_y - 5}" x2="756" y2="{legend_y - 5}" {ARROW}/>',
        text(766, legend_y, "micro-DP group", 13, anchor="start"),
    ]
    marker = (
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="6" markerHeight="6" '
        f'orient="auto-start-reverse"><path d="M0,0 L10,5 L0,10 z" fill="{MOVE}"/></marker></defs>'
    )
    plain = panel(
        126,
        "plain order: shard s on rank s",
        "ranks 1, 2, 5 and 6 own nothing of what they need: they must be sent all of it, and hold their shard besides",
        TrainingLayout(dims=dims),
        arrows=False,
    )
    permuted = panel(
        372,
        "permuted order: s(r) = (r mod t) N/t + r div t",
        "every shard lies inside its own rank's slice; only ranks with the same tp coordinate exchange shards",
        TrainingLayout.permuted(dims, TP),
        arrows=True,
    )
    body = "".join([marker, rect(0, 0, WIDTH, HEIGHT, "#ffffff"), *head, plain, permuted, *legend])
    label = "Shards of eight ranks in plain and in permuted order, against the slices that generation needs"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="Helvetica, Arial, sans-serif" role="img" aria-label="{label}">{body}</svg>\n'
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture(), encoding="utf-8")
