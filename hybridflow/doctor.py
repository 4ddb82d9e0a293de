"""``python -m hybridflow.doctor``: what this machine has for training, and one fix per problem."""

from hybridflow.cli.doctor import main

if __name__ == "__main__":
    raise SystemExit(main())
