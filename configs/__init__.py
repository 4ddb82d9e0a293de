"""YAML of the commands, installed as the package ``hybridflow.configs`` (Hydra searches ``pkg://hybridflow.configs``)."""
