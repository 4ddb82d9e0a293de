"""The run-time check behind shape annotations, on in tests and absent in production.

conftest.py hands ``check`` to jaxtyping, which wraps every annotated function of the rooms that compute with tensors: a
call whose tensors do not have the written dtype and shape (one letter, one size) fails.
"""

from __future__ import annotations

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
"""An int is a float, as everywhere in Python."""
