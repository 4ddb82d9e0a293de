"""``python -m hybridflow.report FOLDER [FOLDER ...]``: curves of finished or running runs as one picture."""

from hybridflow.cli.report import main

if __name__ == "__main__":
    main()
