from hybridflow.engines.rollout.registry import ROLLOUT_ENGINES

__all__ = ["ROLLOUT_ENGINES"]
