"""Which packages are built: everything under ``hybridflow``, and ``configs/`` as the package ``hybridflow.configs``.

Everything else about the project stands in pyproject.toml; this list is computed, so that a new room or a new config
group needs no line here.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["hybridflow", "hybridflow.*"]),
        "hybridflow.configs",
        *(f"hybridflow.configs.{group}" for group in find_packages("configs")),
    ],
    package_dir={"hybridflow": "hybridflow", "hybridflow.configs": "configs"},
)
