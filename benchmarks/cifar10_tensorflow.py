"""The CIFAR-10 tutorial's program in TensorFlow, to compare rows per second and accuracy.

    python benchmarks/cifar10_tensorflow.py DATA_DIR [--steps 150] [--evaluate-every 2000]

Run it in a separate environment with `tensorflow-cpu`. It builds one graph, as programs of that time did:
queues that 16 threads fill with distorted pictures, plain gradient descent, and moving averages of the
weights. With `--evaluate-every`, it prints the precision @ 1 of the averaged weights on the test pictures.
The last line is `rows/s X`, over the measured steps.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1

ROWS = 50_000
PICTURE_BYTES = 3 * 32 * 32
NUM_THREADS = 16
WARM_UP_STEPS = 30


def read_example(files: list[str]) -> tuple[Any, Any]:
    """Return one record: float32 [32, 32, 3] and int32 []."""
    reader = v1.FixedLengthRecordReader(record_bytes=1 + PICTURE_BYTES)
    _, record = reader.read(v1.train.string_input_producer(files))
    values = tf.io.decode_raw(record, tf.uint8)
    picture = tf.transpose(tf.reshape(values[1:], [3, 32, 32]), [1, 2, 0])
    return tf.cast(picture, tf.float32), tf.cast(values[0], tf.int32)


def distort(picture: Any) -> Any:
    """Crop, flip, brighten, change the contrast, standardise: [32, 32, 3] -> [24, 24, 3]."""
    picture = tf.image.random_crop(picture, [24, 24, 3])
    picture = tf.image.random_flip_left_right(picture)
    picture = tf.image.random_brightness(picture, max_delta=63)
    picture = tf.image.random_contrast(picture, lower=0.2, upper=1.8)
    return tf.image.per_image_standardization(picture)


def training_batches(folder: Path, batch_size: int) -> tuple[Any, Any]:
    """Return batches from a shuffling queue."""
    files = [str(folder / f"data_batch_{index}.bin") for index in range(1, 6)]
    with tf.device("/cpu:0"):
        picture, label = read_example(files)
        least = int(0.4 * ROWS)
        pictures, labels = v1.train.shuffle_batch(
            [distort(picture), label],
            batch_size=batch_size,
            num_threads=NUM_THREADS,
            capacity=least + 3 * batch_size,
            min_after_dequeue=least,
        )
    return pictures, labels


def weights_of(shape: list[int], sigma: float) -> Any:
    """Return a variable drawn from a normal distribution cut off at two standard deviations."""
    start = v1.truncated_normal_initializer(stddev=sigma)
    return v1.get_variable("weights", shape, initializer=start)


def biases_of(size: int, value: float) -> Any:
    """Return a constant variable."""
    return v1.get_variable("biases", [size], initializer=v1.constant_initializer(value))


def convolution(values: Any, name: str, num_inputs: int, bias: float) -> Any:
    """Return relu(5×5 convolution to 64 channels)."""
    with v1.variable_scope(name):
        kernel, biases = weights_of([5, 5, num_inputs, 64], 0.05), biases_of(64, bias)
        summed = tf.nn.conv2d(values, kernel, strides=[1, 1, 1, 1], padding="SAME")
        return tf.nn.relu(tf.nn.bias_add(summed, biases))


def linear(values: Any, name: str, size: int, *, sigma: float, bias: float, decay: float = 0.0) -> Any:
    """Return a linear layer; its decay goes into the collection of losses."""
    with v1.variable_scope(name):
        weights, biases = weights_of([int(values.shape[1]), size], sigma), biases_of(size, bias)
        if decay:
            v1.add_to_collection("losses", decay * tf.nn.l2_loss(weights))
        return tf.matmul(values, weights) + biases


def pool(values: Any) -> Any:
    """Return the largest of each 3×3 window, at half the size."""
    return tf.nn.max_pool2d(values, ksize=3, strides=2, padding="SAME")


def normalise(values: Any) -> Any:
    """Return the local response normalisation."""
    return tf.nn.local_response_normalization(values, 4, bias=1.0, alpha=0.001 / 9, beta=0.75)


def logits_of(pictures: Any) -> Any:
    """Return the net's outputs, [rows, 10]."""
    values = normalise(pool(convolution(pictures, "conv1", 3, 0.0)))
    values = pool(normalise(convolution(values, "conv2", 64, 0.1)))
    values = tf.reshape(values, [pictures.shape[0], -1])
    values = tf.nn.relu(linear(values, "local3", 384, sigma=0.04, bias=0.1, decay=0.004))
    values = tf.nn.relu(linear(values, "local4", 192, sigma=0.04, bias=0.1, decay=0.004))
    return linear(values, "softmax_linear", 10, sigma=1 / 192, bias=0.0)


def training_step(pictures: Any, labels: Any) -> tuple[Any, Any, Any]:
    """Return the operation of one update and averaging, the loss, and the averages."""
    cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits_of(pictures))
    loss = tf.add_n([tf.reduce_mean(cross_entropy), *v1.get_collection("losses")])
    step = v1.train.get_or_create_global_step()
    num_decay_steps = 350 * ROWS // int(pictures.shape[0])
    rate = v1.train.exponential_decay(0.1, step, num_decay_steps, 0.1, staircase=True)
    update = v1.train.GradientDescentOptimizer(rate).minimize(loss, global_step=step)
    average = tf.train.ExponentialMovingAverage(0.9999, step)
    with tf.control_dependencies([update]):
        return average.apply(v1.trainable_variables()), loss, average


class Test:
    """Evaluates the averaged weights on the central crops of the test pictures."""

    def __init__(self, folder: Path, average: Any, batch_size: int = 100) -> None:
        records = np.fromfile(folder / "test_batch.bin", np.uint8).reshape(-1, batch_size, 1 + PICTURE_BYTES)
        self.labels = records[..., 0]
        planes = records[..., 1:].reshape(-1, batch_size, 3, 32, 32)[..., 4:28, 4:28]
        self.pictures = np.moveaxis(planes, 2, -1)
        self.crops = v1.placeholder(tf.float32, [batch_size, 24, 24, 3])

        def averaged(getter: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return average.average(getter(*args, **kwargs))

        with v1.variable_scope("", reuse=True, custom_getter=averaged):
            self.guesses = tf.argmax(logits_of(tf.image.per_image_standardization(self.crops)), 1)

    def precision(self, session: Any) -> float:
        """Return the share of pictures whose label has the largest output."""
        guesses = [session.run(self.guesses, {self.crops: pictures}) for pictures in self.pictures]
        return float(np.mean(np.stack(guesses) == self.labels))


def rows_per_second(folder: Path, batch_size: int, num_steps: int, evaluate_every: int) -> float:
    """Train, and return the rate after some warm-up steps."""
    pictures, labels = training_batches(folder, batch_size)
    step, loss, average = training_step(pictures, labels)
    test = Test(folder, average)
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        coordinator = v1.train.Coordinator()
        threads = v1.train.start_queue_runners(session, coordinator)
        for _ in range(WARM_UP_STEPS):
            session.run(step)
        start_s = time.perf_counter()
        for number in range(WARM_UP_STEPS + 1, WARM_UP_STEPS + num_steps + 1):
            session.run(step)
            if evaluate_every and number % evaluate_every == 0:
                print(f"step {number}: precision @ 1 = {test.precision(session):.4f}", flush=True)
        took_s = time.perf_counter() - start_s
        print(f"tensorflow {tf.__version__}, loss {session.run(loss):.3f}")
        coordinator.request_stop()
        coordinator.join(threads, stop_grace_period_secs=10, ignore_live_threads=True)
    return num_steps * batch_size / took_s


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data_dir", type=Path, help="holds cifar-10-batches-bin")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--evaluate-every", type=int, default=0, metavar="STEPS")
    arguments = parser.parse_args()
    v1.disable_eager_execution()
    tf.get_logger().setLevel("ERROR")  # it warns that everything here is deprecated
    folder = arguments.data_dir / "cifar-10-batches-bin"
    rate = rows_per_second(folder, arguments.batch_size, arguments.steps, arguments.evaluate_every)
    print(f"rows/s {rate:.1f}")


if __name__ == "__main__":
    main()
