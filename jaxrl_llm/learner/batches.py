"""Packed mini-batches: the inputs of the losses, and their weights."""

import functools
from collections.abc import Iterable

import numpy as np

from jaxrl_llm import masked
from jaxrl_llm.learner.algorithm import Algorithm
from jaxrl_llm.learner.packing import MiniBatch, PackedBatch
from jaxrl_llm.types import Experience

VALUE_MODE = "token-mean"  # Reduction of the critic's loss.


def policy_batch(
  inputs: Experience,
  batch: MiniBatch,
  algorithm: Algorithm,
  size: float | None = None,
) -> PackedBatch:
  """Packs the inputs of a mini-batch's rows; weights are over these rows.

  The reduction over the mini-batch (VAPO eq. 7-8: its token mean) and that of
  every auxiliary loss (eq. 9-10: over its correct responses) are fixed before
  any micro-batching. An off-policy correction multiplies the weights; the
  denominator stays that of all tokens.

  Args:
    inputs: the algorithm's `experience` for the b rows.
    batch: the rows and their layout.
    algorithm: the method.
    size: as in `masked.token_weights`, if the rows are a part of a mini-batch.
  """
  mask = read = inputs["policy_mask"]
  # On the host: what the device is given would wait behind the last update.
  weigh = functools.partial(masked.token_weights, size=size, xp=np)
  weights = weigh(mask, mode=algorithm.loss_mode, norm=algorithm.loss_norm)
  columns = {name: inputs[name] for name in algorithm.policy_inputs}
  if algorithm.correction is not None:
    weights = weights * algorithm.correction(inputs).weights
  for name, term in algorithm.auxiliary.items():
    columns[f"{name}_weights"] = weigh(
      inputs[term.mask], mode=term.mode, norm=term.norm
    )
    # Auxiliary losses may read tokens of earlier windows.
    read = read | inputs[term.mask]
  scale = None
  if algorithm.step_scale is not None:
    scale = np.float32(algorithm.step_scale(inputs))
  columns["weights"] = weights
  return _packed(batch, read, mask, columns).replace(step_scale=scale)


def critic_batch(
  inputs: Experience,
  batch: MiniBatch,
  algorithm: Algorithm,
  size: float | None = None,
) -> PackedBatch:
  """Packs the rows of a mini-batch for the critic, a token mean over them.

  Arguments as in `policy_batch`.
  """
  over = {"mask": "value_mask", "mode": VALUE_MODE}
  reads = algorithm.value_inputs
  return plain_batch(inputs, batch, algorithm, size, reads=reads, **over)


def plain_batch(
  inputs: Experience,
  batch: MiniBatch,
  algorithm: Algorithm,
  size: float | None = None,
  *,
  reads: Iterable[str],
  mask: str,
  mode: str,
) -> PackedBatch:
  """Packs the inputs that a loss reads, and its weights.

  Args:
    inputs: as in `policy_batch`, like the next three.
    batch: likewise.
    algorithm: likewise.
    size: likewise.
    reads: names of the inputs [b, T] of the loss.
    mask: name of the bool input [b, T] with the tokens of the loss.
    mode: reduction over them, of `masked.token_weights`.
  """
  del algorithm
  columns = {name: inputs[name] for name in reads}
  columns["weights"] = masked.token_weights(
    inputs[mask], mode=mode, size=size, xp=np
  )
  return _packed(batch, inputs[mask], inputs[mask], columns)


def _packed(batch: MiniBatch, read, mask, columns) -> PackedBatch:
  """Columns [b, T] where the model is read, and the mask of its main loss."""
  scatter = batch.layout.scatter
  return PackedBatch(
    packed=batch.packed.replace(mask=scatter(read)),
    mask=scatter(mask),
    inputs={name: scatter(x) for name, x in columns.items()},
  )
