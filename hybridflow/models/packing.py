"""Packed rows: a padded batch becomes one row of N tokens without padding, and results go back to ``[b, T]``.

    row 0: p p p | r r r        packed ids   p p p r r . p p r r r .      (rows sorted by length)
    row 1: p p | r r r r        positions    0 1 2 3 4   0 1 2 3 4

The last response token of a row is left out: nothing is predicted from it. Response token t of a row is predicted at
the position of the token before it, and its value (the return expected before it) is read at the same position.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridflow.batch.batch import Batch
from hybridflow.utils.errors import ColumnError


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Rows of one micro-batch, packed. N tokens, n response tokens, b rows, T response columns."""

    input_ids: Tensor
    """``[1, N]`` int64."""
    position_ids: Tensor
    """``[1, N]`` int64, from 0 in every segment."""
    lengths: tuple[int, ...]
    """Tokens of every segment, in packed order; they sum to N."""
    select: Tensor
    """``[n]`` packed position of the token before each response token."""
    targets: Tensor
    """``[n]`` the response tokens."""
    row: Tensor
    """``[n]`` row of the batch that each response token belongs to; empty when this is a stand-in."""
    column: Tensor
    """``[n]`` its position in the response."""
    shape: tuple[int, int]
    """(b, T) of the batch."""

    @property
    def tokens(self) -> int:
        """N."""
        return int(self.input_ids.shape[1])

    @property
    def stands_in(self) -> bool:
        """Whether this holds one made-up token, so that a rank without rows can join the others' collectives."""
        return self.row.numel() == 0

    def padded(self, multiple: int) -> Packed:
        """The same rows with N rounded up to a multiple: made-up tokens form a segment of their own at the end."""
        extra = -self.tokens % multiple
        if extra == 0:
            return self
        ids, positions = self.input_ids.new_zeros(1, extra), torch.arange(extra, device=self.input_ids.device)[None]
        return replace(
            self,
            input_ids=torch.cat([self.input_ids, ids], 1),
            position_ids=torch.cat([self.position_ids, positions], 1),
            lengths=(*self.lengths, extra),
        )

    def unpack(self, values: Tensor) -> Tensor:
        """``[b, T]`` float32 with ``values`` ``[n]`` at response tokens and 0 beyond; keeps the gradient's path."""
        padded = values.new_zeros(self.shape, dtype=torch.float32)
        if self.stands_in:
            return padded + values.sum() * 0.0
        return padded.index_put((self.row, self.column), values.float())


def row_tokens(rows: Batch) -> Tensor:
    """``[b]`` tokens that each row brings into the model: prompt plus response without its last token; 0 if empty."""
    response = rows["response_length"]
    return torch.where(response > 0, rows["prompt_length"] + response - 1, torch.zeros_like(response))


def pack(rows: Batch) -> Packed:
    """The rows' tokens in one packed row, longest segments first (equal lengths are neighbours).

    Reads prompt_ids, prompt_length, response_ids, response_length. A batch without any response token gives a stand-in.

    Raises:
        ColumnError: when a row has no prompt token, or a length beyond its column's width.
    """
    prompts, responses = rows["prompt_ids"], rows["response_ids"]
    prompt_length, response_length = rows["prompt_length"], rows["response_length"]
    _check_lengths(rows)
    tokens = row_tokens(rows)
    shape = (len(rows), int(responses.shape[1]))
    if int(tokens.sum()) == 0:
        return stand_in(shape, prompts.device)
    order = torch.argsort(tokens, descending=True, stable=True)
    order = order[: int((tokens > 0).sum())]
    prompt_length, response_length = prompt_length[order, None], response_length[order, None]
    at_prompt = torch.arange(prompts.shape[1], device=prompts.device)[None]
    at_response = torch.arange(responses.shape[1], device=prompts.device)[None]
    keep = torch.cat([at_prompt < prompt_length, at_response < response_length - 1], dim=1)
    lengths = tokens[order]
    starts = torch.cumsum(lengths, 0) - lengths
    local_row, column = (at_response < response_length).nonzero(as_tuple=True)
    return Packed(
        input_ids=torch.cat([prompts[order], responses[order]], dim=1)[keep][None],
        position_ids=(torch.cumsum(keep, dim=1) - 1)[keep][None],
        lengths=tuple(lengths.tolist()),
        select=starts[local_row] + prompt_length[local_row, 0] - 1 + column,
        targets=responses[order][local_row, column],
        row=order[local_row],
        column=column,
        shape=shape,
    )


def stand_in(shape: tuple[int, int], device: torch.device | str = "cpu") -> Packed:
    """One made-up token that contributes nothing: ``unpack`` gives zeros with a gradient of zero."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    none = zero[:0]
    return Packed(
        input_ids=zero[None],
        position_ids=zero[None],
        lengths=(1,),
        select=zero,
        targets=zero,
        row=none,
        column=none,
        shape=shape,
    )


def _check_lengths(rows: Batch) -> None:
    for ids, length in (("prompt_ids", "prompt_length"), ("response_ids", "response_length")):
        width = rows[ids].shape[1]
        if len(rows) and int(rows[length].max()) > width:
            raise ColumnError(f"{length} goes up to {int(rows[length].max())}, but {ids} is {width} wide")
    empty = (rows["prompt_length"] < 1).nonzero()
    if len(empty):
        raise ColumnError(
            f"row {int(empty[0])} has an empty prompt: its first response token is predicted from nothing"
        )
