"""Methods beyond PPO, GRPO, DAPO, VC-PPO, VAPO and T-PPO, one file each.

A file registers the parts of its method, as a file of `--plugin` does. It is
imported when a config first chooses one of them and never by the package
itself, so that an unused method costs nothing. This table is the only list of
what the files register.
"""

# File -> kind of a part -> its name: a value of `estimator.name`, `loss.name`,
# `data.order` or `off_policy.proximal`, the setting that switches it on, or the
# name of an input, of a companion, of frozen models that other parts read or of
# a critic of several models.
FILES: dict[str, dict[str, str]] = {
  "a_3po": {"proximal": "interpolate"},
  "asyppo": {
    "ensemble": "halves",
    "mask": "agree_share",
    "leaf": "disagreement",
  },
  "cispo": {"loss": "cispo"},
  "distill": {
    "estimator": "distillation",
    "frozen": "teachers",
    "leaf": "teacher_logprobs",
  },
  "gspo": {"loss": "gspo"},
  "hapo": {
    "estimator": "token_group",
    "loss": "hapo",
    "logits_processor": "entropy_tau",
  },
  "kept_weights": {"companion": "kept", "leaf": "writer_logprobs"},
  "mc_grpo": {"mask": "drop_pivot"},
  "ppo_ewma": {"companion": "ema", "leaf": "average_logprobs"},
  "reinforce_pp": {"estimator": "reward_to_go"},
  "rloo": {"loss": "policy_gradient"},
  "sft": {
    "estimator": "given",
    "loss": "likelihood",
    "prompt_source": "demonstrations",
  },
  "vcpo": {
    "estimator": "optimal_baseline",
    "step_scale": "ess_scale",
    "leaf": "gradient_norms",
  },
}
