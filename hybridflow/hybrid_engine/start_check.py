"""What an engine says that it stores against what the rules of the architecture predict: before the first publish.

The publisher follows the engine's own word; plans, memory estimates and ``python -m hybridflow.reshard`` follow the
rules. Where the two differ one of them is wrong, and a wrong slice trains on without an error.
"""

from __future__ import annotations

import logging

from transformers import PretrainedConfig

from hybridflow.engines.rollout.base import EngineParameters
from hybridflow.hybrid_engine.boxes import Box
from hybridflow.hybrid_engine.layouts import generation_difference
from hybridflow.hybrid_engine.rules import RULES
from hybridflow.hybrid_engine.shapes import model_shapes
from hybridflow.utils.errors import EngineError

logger = logging.getLogger(__name__)


def check_layout(parameters: EngineParameters, config: PretrainedConfig, *, tp: int, tp_rank: int) -> bool:
    """Whether the rules were there to compare with; without rules a line in the log says so.

    Args:
        parameters: what the engine of this rank stores.
        config: of the model that it was built from.
        tp: tensor-parallel size of the engine.
        tp_rank: this rank's coordinate.

    Raises:
        EngineError: names every parameter whose blocks are not those that the rules predict, with both.
    """
    model = model_shapes(config)
    if model.architecture not in RULES:
        logger.warning(
            "no sharding rules for %s: what the engine says of its layout cannot be compared with them "
            "(docs/guides/architectures.md); checksums and log-probs are compared all the same",
            model.architecture,
        )
        return False
    held: dict[str, tuple[Box, ...]] = {}
    for part in parameters.parts:
        box = tuple((int(low), int(high)) for low, high in part.hf_box)
        held[part.hf_name] = (*held.get(part.hf_name, ()), box)
    lines = generation_difference(model, held, tp=tp, tp_rank=tp_rank)
    if lines:
        raise EngineError(
            f"the generator does not store {model.architecture} as the sharding rules predict; nothing was written\n"
            + "\n".join(lines)
        )
    return True
