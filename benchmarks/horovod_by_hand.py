"""The training network with Horovod alone, as Horovod's documentation has it: no Spark, no sparkdl.

Started by training.py through ``horovodrun -np N``. A compiled step per batch with
``DistributedGradientTape``, fed by ``tf.data``. The first epoch is not counted (tracing,
connecting). Each rank prints its rows per second and the trained model's loss on all rows.
"""

from __future__ import annotations

import os
import sys
import time

import tensorflow as tf

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import horovod.tensorflow as hvd  # noqa: E402
import workload  # noqa: E402


def main() -> None:
    hvd.init()
    all_x, all_y = workload.make_data()
    x, y = all_x[hvd.rank() :: hvd.size()].copy(), all_y[hvd.rank() :: hvd.size()].copy()
    model = workload.make_model()
    optimizer, loss_of = model.optimizer, tf.keras.losses.SparseCategoricalCrossentropy()
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=hvd.rank())
    data = data.batch(workload.BATCH, drop_remainder=True).prefetch(4)  # equal steps on all ranks

    variables = [v.value for v in model.trainable_variables]  # Horovod does not know Keras 3's own

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    weights = model.get_weights()
    for images, labels in data:
        step(images, labels)
    model.set_weights(weights)
    hvd.broadcast_variables([v.value for v in model.variables], root_rank=0)
    hvd.allreduce(tf.zeros([]), name="together")
    started = time.perf_counter()
    for _ in range(workload.EPOCHS):
        steps = [step(images, labels) for images, labels in data]
    seconds = time.perf_counter() - started
    rows = len(steps) * workload.BATCH * workload.EPOCHS
    loss = float(model.evaluate(all_x, all_y, batch_size=1024, verbose=0)[0])
    print(f"RESULT {rows / seconds} {loss}", flush=True)
    hvd.shutdown()


main()
