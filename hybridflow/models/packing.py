"""Packed rows: a padded batch becomes one row of N tokens without padding, and results go back to ``[b, T]``.

    row 0: p p p | r r r        packed ids   p p p r r . p p r r r .      (rows sorted by length)
    row 1: p p | r r r r        positions    0 1 2 3 4   0 1 2 3 4

The last response token of a row is left out: nothing is predicted from it. Response token t of a row is predicted at
the position of the token before it, and its value (the return expected before it) is read at the same position.

Rows of one prompt may share it: the prompt is then a segment of its own, and what each row adds is a branch, a segment
whose tokens also see that prompt. The first response token of all these rows is predicted at the prompt's last token.

    row 0: p p p | a a a        packed ids   p p p | b b b | a a .
    row 1: p p p | b b b b      positions    0 1 2   3 4 5   3 4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hybridflow.batch.batch import Batch
from hybridflow.utils.errors import ColumnError

ALONE = -1
"""The prefix of a segment that continues no other one."""
SHORTEST_SHARED = 2
"""Tokens of a prompt that is worth sharing: text blocks have one, and nothing is saved by encoding that once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Rows of one micro-batch, packed. N tokens, n response tokens, b rows, T response columns."""

    input_ids: Tensor
    """``[1, N]`` int64."""
    position_ids: Tensor
    """``[1, N]`` int64, from 0 in every segment; a branch counts on from its prefix."""
    lengths: tuple[int, ...]
    """Tokens of every segment, in packed order; they sum to N."""
    prefixes: tuple[int, ...]
    """For every segment the one that it continues (an earlier one, itself alone), or ``ALONE``."""
    select: Tensor
    """``[n]`` packed position of the token before each response token."""
    targets: Tensor
    """``[n]`` the response tokens."""
    row: Tensor
    """``[n]`` row of the batch that each response token belongs to; empty when this is a stand-in."""
    column: Tensor
    """``[n]`` its position in the response."""
    shape: tuple[int, int]
    """(b, T) of the batch."""

    @property
    def tokens(self) -> int:
        """N."""
        return int(self.input_ids.shape[1])

    @property
    def stands_in(self) -> bool:
        """Whether this holds one made-up token, so that a rank without rows can join the others' collectives."""
        return self.row.numel() == 0

    @property
    def seen(self) -> tuple[int, ...]:
        """For every segment, how many tokens before its own it sees: its prefix's length."""
        return tuple(0 if prefix == ALONE else self.lengths[prefix] for prefix in self.prefixes)

    def padded(self, multiple: int) -> Packed:
        """The same rows with N rounded up to a multiple: made-up tokens form a segment of their own at the end."""
        extra = -self.tokens % multiple
        if extra == 0:
            return self
        ids, positions = self.input_ids.new_zeros(1, extra), torch.arange(extra, device=self.input_ids.device)[None]
        return replace(
            self,
            input_ids=torch.cat([self.input_ids, ids], 1),
            position_ids=torch.cat([self.position_ids, positions], 1),
            lengths=(*self.lengths, extra),
            prefixes=(*self.prefixes, ALONE),
        )

    def unpack(self, values: Tensor) -> Tensor:
        """``[b, T]`` float32 with ``values`` ``[n]`` at response tokens and 0 beyond; keeps the gradient's path."""
        padded = values.new_zeros(self.shape, dtype=torch.float32)
        if self.stands_in:
            return padded + values.sum() * 0.0
        return padded.index_put((self.row, self.column), values.float())


def row_tokens(rows: Batch) -> Tensor:
    """``[b]`` tokens that each row brings into the model: prompt plus response without its last token; 0 if empty."""
    response = rows["response_length"]
    return torch.where(response > 0, rows["prompt_length"] + response - 1, torch.zeros_like(response))


def prompt_groups(rows: Batch) -> list[int]:
    """For every row the first row with an equal prompt; itself, where the prompt is too short to be shared."""
    first: dict[bytes, int] = {}
    ids, lengths = rows["prompt_ids"].cpu().numpy(), rows["prompt_length"].tolist()
    return [
        first.setdefault(ids[row, :length].tobytes(), row) if length >= SHORTEST_SHARED else row
        for row, length in enumerate(lengths)
    ]


def pack(rows: Batch, groups: Sequence[int] | None = None) -> Packed:
    """The rows' tokens in one packed row: whole rows and shared prompts by falling length, then branches.

    Segments of equal length are neighbours; so are the branches of one prompt. ``groups[i]`` is equal for rows of equal
    prompts, which are then packed once; None: every row brings its own.

    Reads prompt_ids, prompt_length, response_ids, response_length. A batch without any response token gives a stand-in.

    Raises:
        ColumnError: when a row has no prompt token, or a length beyond its column's width.
    """
    prompts, responses = rows["prompt_ids"], rows["response_ids"]
    prompt_length, response_length = rows["prompt_length"], rows["response_length"]
    _check_lengths(rows)
    tokens = row_tokens(rows)
    shape, device = (len(rows), int(responses.shape[1])), prompts.device
    if int(tokens.sum()) == 0:
        return stand_in(shape, device)
    order = torch.argsort(tokens, descending=True, stable=True)
    order = order[: int((tokens > 0).sum())]
    plan = _plan(order.tolist(), prompt_length.tolist(), response_length.tolist(), groups or range(len(rows)))
    row, first, lengths = (torch.tensor(part, device=device) for part in (plan.row, plan.first, plan.lengths))
    # Every packed token's row and place in prompt + response.
    of_row = row.repeat_interleave(lengths)
    offset = torch.cumsum(lengths, 0) - lengths
    place = torch.arange(int(lengths.sum()), device=device) + (first - offset).repeat_interleave(lengths)
    of_prompt = place < prompt_length[of_row]
    from_prompt = prompts[of_row, place.clamp(max=prompts.shape[1] - 1)]
    from_response = responses[of_row, (place - prompt_length[of_row]).clamp(min=0)]
    # Where a row's last prompt token is, and where its response would start; no shared prompt: one after the other.
    ends = torch.tensor(plan.prompt_end, device=device)
    starts = torch.tensor(plan.response_start, device=device)
    at_response = torch.arange(responses.shape[1], device=device)[None]
    local_row, column = (at_response < response_length[order, None]).nonzero(as_tuple=True)
    return Packed(
        input_ids=torch.where(of_prompt, from_prompt, from_response)[None],
        position_ids=place[None],
        lengths=tuple(plan.lengths),
        prefixes=tuple(plan.prefixes),
        select=torch.where(column == 0, ends[local_row], starts[local_row] + column - 1),
        targets=responses[order][local_row, column],
        row=order[local_row],
        column=column,
        shape=shape,
    )


@dataclass(slots=True)
class _Plan:
    """Segments in packed order, and where rows (in the order given) find their tokens."""

    row: list[int] = field(default_factory=list)
    """A row that holds the segment's tokens."""
    first: list[int] = field(default_factory=list)
    """Place of the segment's first token in that row's prompt + response."""
    lengths: list[int] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)
    prompt_end: list[int] = field(default_factory=list)
    """Packed position of every row's last prompt token."""
    response_start: list[int] = field(default_factory=list)
    """Packed position of every row's first response token (if it has one to pack)."""

    def add(self, row: int, first: int, length: int, prefix: int) -> None:
        self.row.append(row)
        self.first.append(first)
        self.lengths.append(length)
        self.prefixes.append(prefix)


def _plan(order: Sequence[int], prompt: Sequence[int], response: Sequence[int], groups: Sequence[int]) -> _Plan:
    """The segments of the rows ``order`` (longest first): whole rows and shared prompts, then branches."""
    members: dict[int, list[int]] = {}
    for row in order:
        members.setdefault(groups[row], []).append(row)
    shared = {group: held for group, held in members.items() if len(held) > 1}
    whole = [(prompt[row] + response[row] - 1, row) for row in order if groups[row] not in shared]
    whole += [(prompt[held[0]], held[0]) for held in shared.values()]
    plan, offset, number_of, offset_of = _Plan(), 0, {}, {}
    for length, row in sorted(whole, key=lambda part: -part[0]):
        number_of[groups[row]], offset_of[groups[row]] = len(plan.lengths), offset
        plan.add(row, 0, length, ALONE)
        offset += length
    branch_of = {}
    for group, held in shared.items():
        for row in held:
            branch_of[row] = offset
            if response[row] > 1:
                plan.add(row, prompt[row], response[row] - 1, number_of[group])
                offset += response[row] - 1
    for row in order:
        end = offset_of[groups[row]] + prompt[row] - 1
        plan.prompt_end.append(end)
        plan.response_start.append(branch_of.get(row, end + 1))
    return plan


def stand_in(shape: tuple[int, int], device: torch.device | str = "cpu") -> Packed:
    """One made-up token that contributes nothing: ``unpack`` gives zeros with a gradient of zero."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    none = zero[:0]
    return Packed(
        input_ids=zero[None],
        position_ids=zero[None],
        lengths=(1,),
        prefixes=(ALONE,),
        select=zero,
        targets=zero,
        row=none,
        column=none,
        shape=shape,
    )


def _check_lengths(rows: Batch) -> None:
    for ids, length in (("prompt_ids", "prompt_length"), ("response_ids", "response_length")):
        width = rows[ids].shape[1]
        if len(rows) and int(rows[length].max()) > width:
            raise ColumnError(f"{length} goes up to {int(rows[length].max())}, but {ids} is {width} wide")
    empty = (rows["prompt_length"] < 1).nonzero()
    if len(empty):
        raise ColumnError(
            f"row {int(empty[0])} has an empty prompt: its first response token is predicted from nothing"
        )
