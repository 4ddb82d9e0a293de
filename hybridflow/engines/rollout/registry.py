"""Names of the rollout engines; ``utils.optional.load`` resolves them, so that a name costs no import."""

from __future__ import annotations

ROLLOUT_ENGINES: dict[str, str] = {
    "vllm": "hybridflow.engines.rollout.vllm:VLLMEngine",
    "hf": "hybridflow.engines.rollout.hf:HFEngine",
}
