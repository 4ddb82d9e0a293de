"""``python -m hybridflow.profile [KEY=VALUE ...]``: where the time and memory of a step of ``main_ppo`` go."""

from hybridflow.cli.profile import main

if __name__ == "__main__":
    raise SystemExit(main())
