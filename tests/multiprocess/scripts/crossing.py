"""Prints what crosses between devices in a step, and whether the copies of the variables are what they should be."""

import collections
import re
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

import keras_dist as kd

BACKENDS = {
    "mirrored": lambda: kd.Mirrored(devices=["CPU:0", "CPU:1", "CPU:2"]),
    "others": lambda: kd.Mirrored(devices=["CPU:1", "CPU:0", "CPU:2"]),
    "central_storage": lambda: kd.CentralStorage(compute_devices=["CPU:1", "CPU:2"], parameter_device="CPU:0"),
}


def build() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.Input([64]), keras.layers.Dense(512, "relu"), keras.layers.Dense(8)]
    model = kd.distribute(keras.Sequential(layers))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def crossing(model: keras.Model, batch: Any) -> dict[str, int]:
    """Returns how many numbers each device sends to another in a step, by their kind and the pair; not the few."""

    def step(batch: Any) -> Any:
        return model.distribute_strategy.run(model.train_step, (batch,))

    tf.function(step, autograph=False)(batch)  # makes what is made once
    context.enable_run_metadata()
    traced = tf.function(step, autograph=False)
    traced(batch)
    metadata = context.export_run_metadata()
    context.disable_run_metadata()
    operations = {operation.name: operation for operation in traced.get_concrete_function(batch).graph.get_operations()}
    sent: dict[str, int] = collections.defaultdict(int)
    parts = [part for function in metadata.function_graphs for part in function.partition_graphs]
    for node in (node for part in parts for node in part.node if node.op == "_Recv"):
        name = re.fullmatch(r"edge_\d+_(.*)", node.attr["tensor_name"].s.decode())[1]
        if name.startswith("GroupCrossDeviceControlEdges"):
            continue  # only an order
        pair = "->".join(node.attr[f"{end}_device"].s.decode()[-5:] for end in ("send", "recv"))
        size = max((output.shape.num_elements() or 0 for output in operations[name].outputs), default=0)
        if size > 64:
            sent[f"{'weight' if operations[name].type == 'ReadVariableOp' else 'other'} {pair}"] += size
    return dict(sorted(sent.items()))


def differing(model: keras.Model) -> list[str]:
    """Returns the variables whose copies differ from them; the number of copies must be right, too."""
    found = []
    for variable in [*model.variables, *model.optimizer.variables]:
        copies = vars(variable.value).get("_keras_dist_copies", {})
        if len(copies) != kd.num_replicas() - 1:
            found.append(f"{variable.path}: {len(copies)} copies")
        found += [f"{variable.path} on {device}" for device, copy in copies.items()
                  if not np.array_equal(copy.numpy(), np.asarray(variable))]  # fmt: skip
    return found


def main(name: str) -> None:
    kd.init(BACKENDS[name]())
    keras.backend.clear_session()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=[60, 64]).astype("float32"), rng.normal(size=[60, 8]).astype("float32")
    model = build()
    model.fit(x, y, batch_size=12, epochs=2, verbose=0)
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    print(sorted({variable.value.device[-5:] for variable in variables}))
    print(crossing(model, (tf.constant(x[:12]), tf.constant(y[:12]))))
    if name == "central_storage":
        return
    print("after fit:", differing(model))
    model.set_weights([weight * 2 for weight in model.get_weights()])
    model.optimizer.learning_rate = 0.5
    model.optimizer.iterations.assign(7)
    print("after assignments:", differing(model))
    weight = model.layers[0].kernel
    tf.raw_ops.AssignVariableOp(resource=weight.value.handle, value=tf.zeros([64, 512]))  # nobody can see it
    try:
        model.fit(x, y, batch_size=12, verbose=0)
    except kd.MismatchError as error:
        print(error)


main(sys.argv[1])
