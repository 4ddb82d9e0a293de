"""``python -m hybridflow.reshard``: what moving weights from one layout to another costs."""

from hybridflow.cli.reshard import main

if __name__ == "__main__":
    raise SystemExit(main())
