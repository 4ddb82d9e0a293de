"""``python -m hybridflow.main_ppo``: PPO, GRPO and their relatives (cli/ppo.py)."""

from hybridflow.cli.ppo import main

if __name__ == "__main__":
    raise SystemExit(main())
