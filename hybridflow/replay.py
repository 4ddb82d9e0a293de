"""``python -m hybridflow.replay``: one update that was not finite, run again on this machine's CPU."""

from hybridflow.cli.replay import main

if __name__ == "__main__":
    raise SystemExit(main())
