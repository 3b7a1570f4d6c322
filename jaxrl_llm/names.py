"""Names that settings and computations share; read before JAX is."""

# Reductions of a per-token loss that divide by a constant length, see
# `masked.token_weights`.
NORM_MODES = ("seq-mean-token-sum-norm", "dr-grpo")
# Estimators that read values, so that a critic is trained.
CRITICS = {"gae"}
