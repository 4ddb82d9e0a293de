"""``python -m hybridflow.config_keys``: what happens to a configuration key (cli/config_keys.py)."""

from hybridflow.cli.config_keys import main

if __name__ == "__main__":
    raise SystemExit(main())
