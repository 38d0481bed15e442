"""What is promised: one id per case. `test_rows.py` proves that each has a test on every registered backend.

Unless a row says otherwise, weights, history and predictions are those of one plain process: within 1e-9 in
float64, 1e-6 in float32 (1e-5 for Adam), bit-identical on all ranks.
"""

from __future__ import annotations

DATA = {
    "data-numpy": "NumPy arrays, shuffled by `fit` without a seed",
    "data-numpy-unshuffled": "NumPy arrays, `shuffle=False`",
    "data-tensors": "Tensors",
    "data-tf-batched": "`tf.data`, batched",
    "data-tf-shuffled-unseeded": "`tf.data`, shuffled without a seed",
    "data-tf-cached-prefetched": "`tf.data`, cached, shuffled, prefetched",
    "data-tf-repeated-steps-per-epoch": "`tf.data`, repeated, with `steps_per_epoch`",
    "data-tf-steps-per-epoch-unrepeated": "`tf.data`, `steps_per_epoch` without repeat",
    "data-tf-unknown-size": "`tf.data` of unknown length",
    "data-last-batch-odd": "Last batch that the ranks don't divide",
    "data-first-batch-odd": "First batch that the ranks don't divide",
    "data-last-batch-smaller-than-ranks": "Last batch smaller than the number of ranks",
    "data-smaller-than-ranks": "Data set smaller than the number of ranks",
    "data-drop-remainder": "`drop_remainder=True`",
    "data-drop-remainder-odd-batch": "`drop_remainder=True`, batches that the ranks don't divide",
    "data-validation-data": "`validation_data`, arrays",
    "data-validation-dataset": "`validation_data`, `tf.data`, `validation_freq`",
    "data-validation-split": "`validation_split`",
    "data-dict-inputs": "Dicts of inputs and outputs",
    "data-tuple-inputs": "Tuples of inputs",
    "data-sample-weight": "`sample_weight`, `weighted_metrics`",
    "data-class-weight": "`class_weight`",
    "data-integers-and-strings": "Strings, looked up and embedded",
    "data-tfrecord": "TFRecord file",
    "data-tfrecord-interleaved": "TFRecord files, interleaved in parallel",
    "data-generator": "Python generator (the chief reads)",
    "data-generator-infinite": "Infinite generator, `steps_per_epoch`",
    "data-generator-validation": "Generator to validate, evaluate and predict with",
    "data-generator-unseeded": "Generator of unseeded random data: all ranks train on the chief's",
    "data-pydataset": "`PyDataset`",
    "data-pydataset-2-workers": "`PyDataset`, `workers=2`",
    "data-pydataset-fork": "`PyDataset`, `use_multiprocessing=True` by fork",
    "data-pydataset-spawn": "`PyDataset`, `use_multiprocessing=True` by spawn; `kd.init()` in the child is refused",
    "data-ragged": "Ragged tensors",
    "data-sparse": "Sparse tensors",
    "data-scipy-sparse": "SciPy's sparse matrices",
    "data-without-targets": "No targets: `(x,)`, `None`",
    "data-small-dtypes": "Inputs of bool, uint8, float16",
    "once-numpy": "Every example once an epoch: arrays",
    "once-tf-shuffled": "Every example once an epoch: `tf.data`, shuffled",
    "once-small-batches": "Every example once an epoch: batches smaller than the ranks",
}

TRAINING = {
    "fit-float32": "float32",
    "fit-float64": "float64",
    "fit-mixed-bfloat16": "mixed_bfloat16, as the mean over the same shares in one process",
    "fit-functional-multi-output": "Functional model, several outputs, `loss_weights`",
    "fit-subclassed": "Subclassed model, unbuilt",
    "fit-own-train-step": "Own `train_step` and `test_step` with `compute_loss`",
    "fit-own-train-step-raw-mean": "Own `train_step` with a mean by hand and own logs",
    "fit-embedding": "Embedding (sparse gradients)",
    "fit-embedding-adam": "Embedding, Adam",
    "fit-embedding-global-clipnorm": "Embedding, `global_clipnorm`",
    "fit-batchnorm": "BatchNormalization, as the mean over the same shares; statistics averaged",
    "fit-dropout": "Dropout, other masks on each rank, reproducible",
    "fit-l2-regularizer": "L1 and L2 regularizers",
    "fit-run-eagerly": "`run_eagerly=True`",
    "fit-steps-per-execution-1": "`steps_per_execution=1`",
    "fit-steps-per-execution-4": "`steps_per_execution=4`",
    "fit-steps-per-execution-not-dividing": "`steps_per_execution=4`, 7 steps",
    "fit-several-times": "Several `fit` calls",
    "fit-initial-epoch": "`initial_epoch`",
    "evaluate": "`evaluate`: arrays, `tf.data`, weights, `steps`",
    "predict": "`predict`: every example, in order, on every rank",
    "predict-outputs": "`predict`: several outputs and dtypes",
    "train-on-batch": "`train_on_batch`",
    "test-on-batch": "`test_on_batch`",
    "predict-on-batch": "`predict_on_batch`",
    "metrics-accuracy": "Accuracy",
    "metrics-auc-precision": "AUC and Precision (state in arrays)",
    "metrics-mean-iou": "MeanIoU (confusion matrix)",
    "compiled-before": "Compiled before `kd.distribute`",
    "fitted-before": "Fitted before `kd.distribute`",
    "loaded-before": "Loaded before `kd.distribute`, with the optimizer's state",
    "distributed-twice": "`kd.distribute` twice",
    "recompiled": "Frozen, fitted, unfrozen, compiled anew, fitted",
    "evaluated-first": "`evaluate` before `fit`",
    "two-models": "A second model after `clear_session()`, of other shapes",
}

_NAMES = {"sgd": "SGD", "momentum": "SGD with Nesterov momentum", "adam": "Adam", "adamw": "AdamW"}
_CLIPS = {"clipnorm": "`clipnorm`", "global-clipnorm": "`global_clipnorm`", "clipvalue": "`clipvalue`"}

OPTIMIZERS = {
    **_NAMES,
    **{f"{optimizer}-float32": f"{name}, float32" for optimizer, name in _NAMES.items()},
    **{f"{optimizer}-{clip}": f"{_NAMES[optimizer]}, {_CLIPS[clip]}" for optimizer in _NAMES for clip in _CLIPS},
    "learning-rate-schedule": "Learning-rate schedule",
    "gradient-accumulation": "`gradient_accumulation_steps`, with clipping",
    "ema-overwrite": "`use_ema`, `ema_overwrite_frequency`",
    "ema-overwrite-at-end": "`use_ema`, overwritten at the end of an epoch",
    "loss-scaling": "LossScaleOptimizer",
    "rmsprop": "RMSprop, centered, with momentum",
    "nadam": "Nadam, `clipnorm`",
    "ftrl": "Ftrl",
    "lion": "Lion",
    "adafactor": "Adafactor",
    "lamb": "Lamb",
    "muon": "Muon",
    "cosine-decay": "CosineDecay with warm-up",
    "weight-decay-excluded": "Weight decay, `exclude_from_weight_decay`",
    "learning-rate-by-callback": "A learning rate set by a callback, between epochs and batches",
    "gradient-accumulation-reductions": "`gradient_accumulation_steps`: one reduction for each real update",
    "loss-scaling-overflow": "LossScaleOptimizer, an infinite loss on one rank: all skip the update",
    "fit-mixed-float16": "mixed_float16, as the mean over the same shares in one process",
    "compression-fp16": "Gradients as float16 on the wire, as one process that rounds the same shares'; within 1e-3 of uncompressed weights",
    "compression-bf16": "Gradients as bfloat16 on the wire, as one process that rounds the same shares'; within 1e-2 of uncompressed weights",
}

LOSSES = {
    "loss-sum": '`reduction="sum"`, uneven weights and none',
    "loss-mean": '`reduction="mean"`, uneven weights and none',
    "loss-sum-over-batch-size": '`reduction="sum_over_batch_size"`, uneven weights and none',
    "loss-mean-with-sample-weight": '`reduction="mean_with_sample_weight"`, uneven weights and none',
    "loss-none": '`reduction="none"`: the gradient of the sum',
    "loss-function": "A function with a value for each example",
    "loss-scalar-function": "A function with one value, which counts as a mean",
    "loss-subclass": "`Loss` subclass",
    "loss-add-loss": "`add_loss` in a layer, which counts as a mean",
    "loss-regularizers": "L1, L2 and activity regularizers, beside a mean and a sum",
    "loss-mask-zero": "Masks (`mask_zero`), shares with different numbers of words",
    "loss-ignore-class": "`ignore_class` of SparseCategoricalCrossentropy",
    "loss-by-hand": "Loss objects called in an own `train_step`: mean, sum, none",
    "loss-class-weight": '`class_weight` under `"mean_with_sample_weight"`',
    "loss-weights": "`loss_weights`, other reductions for each output",
}

CALLBACKS = {
    "model-checkpoint": "ModelCheckpoint",
    "model-checkpoint-best-weights": "ModelCheckpoint, best weights only",
    "model-checkpoint-between-batches": "ModelCheckpoint, `save_freq` in batches",
    "tensorboard": "TensorBoard",
    "csv-logger": "CSVLogger",
    "early-stopping": "EarlyStopping, `restore_best_weights`",
    "reduce-lr-on-plateau": "ReduceLROnPlateau",
    "learning-rate-scheduler": "LearningRateScheduler",
    "terminate-on-nan": "TerminateOnNaN, in the middle of an epoch",
    "backup-and-restore": "BackupAndRestore",
    "custom-callback-logs": "A callback of one's own: logs and weights",
    "callback-evaluates": "A callback that evaluates and predicts",
    "chief-only": "`kd.callbacks.ChiefOnly`",
}

FILES = {
    "save": "`model.save`: same `config.json`, loads in plain Keras with the optimizer's state",
    "save-subclassed": "`model.save`: registered subclassed model",
    "loads-without-keras-dist": "A saved model loads in a process without keras_dist",
    "save-weights": "`save_weights`",
    "load-weights": "`load_weights`",
    "save-path-of-the-chief": "A path that differs by rank becomes the chief's",
    "get-config": "Configurations of model, optimizer and `compile`",
    "clone-copy-pickle": "`clone_model`, `deepcopy` and `pickle` give plain models",
}

API = {
    "who-am-i": "`kd.rank`, `size`, `local_rank`, `is_chief`",
    "broadcast": "`kd.broadcast`",
    "barrier": "`kd.barrier`",
    "init-again": "`kd.init` twice; another backend is refused",
}

ERRORS = {
    "refuses-other-targets": "`kd.distribute` of something else is refused",
    "refuses-jit-compile": "`jit_compile=True` is refused",
    "refuses-metric-that-does-not-add-up": "A metric whose state doesn't add up is refused by name",
    "stops-different-data": "Data that differ by rank stop the run",
    "stops-different-learning-rates": "Learning rates that differ by rank stop the run",
    "stops-different-weights": "Weights that differ by rank stop the run, by name",
    "stops-different-models": "Models that differ by rank stop the run",
    "stops-different-calls": "Ranks in different calls stop, both named",
}

GROUPS = {
    "Data": DATA,
    "Training": TRAINING,
    "Optimizers": OPTIMIZERS,
    "Losses": LOSSES,
    "Callbacks": CALLBACKS,
    "Files": FILES,
    "API": API,
    "Errors": ERRORS,
}
ROWS = {row: text for group in GROUPS.values() for row, text in group.items()}
