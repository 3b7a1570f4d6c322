"""Methods beyond PPO, GRPO, DAPO, VC-PPO, VAPO and T-PPO, one file each.

A file registers the parts of its method, as a `--plugin` file does. It is
imported when a config first selects one of them and never by the package
itself, so that an unused method costs nothing. This table is the only list of
the parts that the files register.
"""

# File -> kind of part -> its name, or several separated by spaces: a value of
# `estimator.name`, `estimator.lambda_schedule`, `loss.name`, `loss.kl`,
# `value.head`, `data.order`, `reward.group`, `off_policy.proximal` or
# `schedule.replay_for`, the setting that enables it, or the name of an input, a
# companion, frozen models that other parts read, or an ensemble of critics.
FILES: dict[str, dict[str, str]] = {
  "a_3po": {"proximal": "interpolate"},
  "adhint": {"prompt_source": "hints", "estimator": "hinted"},
  "arrol": {"pruning": "arrol"},
  "asyppo": {
    "ensemble": "halves",
    "mask": "agree_share",
    "leaf": "disagreement",
  },
  "cispo": {"loss": "cispo"},
  "dars": {"prompt_source": "dars", "estimator": "example"},
  "dart": {"replay": "unsolved"},
  "deepseek_v3_2": {"loss": "clip_off_policy_mask", "kl": "unbiased"},
  "distill": {
    "estimator": "distillation",
    "frozen": "teachers",
    "leaf": "teacher_logprobs",
  },
  "dots": {"prompt_source": "target_rate"},
  "dppo": {"loss": "dppo_tv dppo_kl"},
  "dps": {"prompt_source": "dps"},
  "evpo": {"estimator": "evpo"},
  "f_tis": {"mask": "max_distance"},
  "gdpo": {"estimator": "gdpo"},
  "gdro": {"prompt_source": "gdro"},
  "gspo": {"loss": "gspo"},
  "hapo": {
    "estimator": "token_group",
    "loss": "hapo",
    "logits_processor": "entropy_tau",
  },
  "hl_gauss": {"value_head": "categorical", "value_loss": "categorical"},
  "kept_weights": {"companion": "kept", "leaf": "writer_logprobs"},
  "kpop": {"loss": "kpop"},
  "majority": {"group_reward": "majority"},
  "maxrl": {"estimator": "maxrl"},
  "mc_grpo": {"mask": "drop_pivot"},
  "nudge": {"prompt_source": "contexts", "estimator": "inter_intra"},
  "poise": {"estimator": "cross_probe", "leaf": "poise_values"},
  "ppo_ewma": {"companion": "ema", "leaf": "average_logprobs"},
  "privileged": {"view": "answer_format"},
  "reinforce_pp": {"estimator": "reward_to_go"},
  "rloo": {"loss": "policy_gradient"},
  "sae": {"lambda_rule": "segments"},
  "sao": {"loss": "dis"},
  "sapo": {"feed": "share_in"},
  "sapo_gate": {"loss": "sapo_gate"},
  "scope": {"prompt_source": "repairs"},
  "search": {"search": "particles dora beam"},
  "sft": {
    "estimator": "given",
    "loss": "likelihood",
    "prompt_source": "demonstrations",
  },
  "sgpo": {"prompt_source": "sgpo"},
  "turn_gae": {"estimator": "turn_gae", "value_mask": "turn_gae"},
  "vcpo": {
    "estimator": "optimal_baseline",
    "step_scale": "ess_scale",
    "leaf": "gradient_norms",
  },
  "xrpo": {"estimator": "sharpened"},
}
