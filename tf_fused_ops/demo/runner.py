"""Runs both parts of the demo, prints what happens and checks the claims."""

from pathlib import Path
from typing import NamedTuple

import tensorflow as tf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import tf_fused_ops
from tf_fused_ops.demo import digits, graphs, measure, photographs, pictures

# Both runs round differently, and training amplifies the difference from step to step.
# Tolerances are shares of the greatest value.
FIRST_LOSSES = 10
FIRST_TOLERANCE = 1e-5
CURVE_TOLERANCE = 1e-4
MINIMUM_ACCURACY = 0.97
LOGITS_TOLERANCE = 1e-5


class Size(NamedTuple):
    """How much the demo computes."""

    epochs: int
    timed_steps: int
    photograph_size: int
    timed_photographs: int


FULL = Size(epochs=15, timed_steps=100, photograph_size=224, timed_photographs=10)
QUICK = Size(epochs=8, timed_steps=10, photograph_size=64, timed_photographs=2)


class Demo:
    """One run of the demo.

    Args:
        size: a Size.
        folder: that receives the pictures; made if missing.
        console: a rich Console.
    """

    def __init__(self, size, folder, console=None):
        self.size = size
        self.folder = Path(folder)
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.failures = 0

    def run(self):
        """Runs everything; returns the number of claims that failed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._digits()
        self._photographs()
        if self.failures:
            self.console.print(f"[bold red]{self.failures} of the claims above failed[/]")
        else:
            self.console.print(f"[bold green]all claims hold[/]; pictures are in {self.folder}")
        return self.failures

    def _claim(self, text, holds):
        self.failures += not holds
        mark = "[green]holds [/]" if holds else "[bold red]FAILS [/]"
        self.console.print(f"  {mark} {text}")

    def _heading(self, text):
        self.console.print(f"\n[bold]{text}[/]")

    def _progress(self):
        return Progress(
            TextColumn("  {task.description:<34}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
        )

    def _print_fused(self, stock_function, fused_function, *inputs):
        """Prints what was fused, and how many ops of each kind both graphs have."""
        stock, fused = (
            graphs.op_counts(function.get_concrete_function(*inputs))
            for function in (stock_function, fused_function)
        )
        for chain, number in graphs.fused_chains(fused_function).items():
            self.console.print(f"  fused {number} x {chain}")
        table = Table("op", "tf.function", "tf_fused_ops.function", box=None, padding=(0, 3, 0, 2))
        for op_type in sorted(stock | fused, key=lambda kind: (not graphs.is_fused(kind), kind)):
            if stock[op_type] != fused[op_type]:
                colour = "[orange1]" if graphs.is_fused(op_type) else "[default]"
                name = f"{colour}{graphs.short_name(op_type)}[/]"
                table.add_row(name, str(stock[op_type]), str(fused[op_type]))
        table.add_row("[bold]all[/]", str(stock.total()), str(fused.total()))
        self.console.print(table)
        self._claim("something was fused", any(graphs.is_fused(kind) for kind in fused))

    def _print_times(self, what, seconds):
        stock, fused = (1e3 * value for value in seconds)
        self.console.print(
            f"  {what}: {stock:.2f} ms with tf.function, {fused:.2f} ms fused, "
            f"ratio {stock / fused:.2f} (medians, measured in turns)"
        )

    def _digits(self):
        data = digits.load()
        self._heading("Handwritten digits: a convolutional network with batch norm and GELU")
        self.console.print(
            f"  {len(data.train_images)} images to train on, {len(data.test_images)} to test on"
        )
        stock = digits.make_training(tf.function)
        fused = digits.make_training(tf_fused_ops.function)
        curves = []
        with self._progress() as progress:
            for training, name in ((stock, "tf.function"), (fused, "tf_fused_ops.function")):
                total = digits.steps(data, self.size.epochs)
                task = progress.add_task(f"training with {name}", total=total)
                batches = digits.batches(data, self.size.epochs)
                curves.append(
                    measure.train(training, batches, lambda task=task: progress.advance(task))
                )
            reached = [
                measure.accuracy(training, data.test_images, data.test_labels)
                for training in (stock, fused)
            ]
            seconds = self._time_steps(stock, fused, data, progress)

        images, labels = data.train_images[: digits.BATCH], data.train_labels[: digits.BATCH]
        self._print_fused(stock.train_step, fused.train_step, images, labels)
        self._print_times(f"a training step of {digits.BATCH} images", seconds)

        first = slice(FIRST_LOSSES)
        start = measure.relative_difference(curves[1][first], curves[0][first])
        whole = measure.relative_difference(curves[1], curves[0])
        self._claim(
            f"the first {FIRST_LOSSES} losses agree within {FIRST_TOLERANCE:g} of the greatest: "
            f"{start:.1e}",
            start <= FIRST_TOLERANCE,
        )
        self._claim(
            f"the whole loss curves agree within {CURVE_TOLERANCE:g} of the greatest: {whole:.1e}",
            whole <= CURVE_TOLERANCE,
        )
        for share, name in zip(reached, ("tf.function", "tf_fused_ops.function"), strict=True):
            self._claim(
                f"test accuracy with {name} is at least {MINIMUM_ACCURACY:.0%}: {share:.2%}",
                share >= MINIMUM_ACCURACY,
            )
        losses = self.folder / "loss_curves.png"
        pictures.draw_losses(*curves, losses)
        self.console.print(f"  picture: {losses}")
        for path, function, inputs in (
            (self.folder / "training_step.html", stock.train_step, [images, labels]),
            (self.folder / "prediction.svg", stock.predict, [images]),
        ):
            tf_fused_ops.viz.draw(function, path, inputs=inputs)
            self.console.print(f"  picture of the graph before and after: {path}")

    def _time_steps(self, stock, fused, data, progress):
        """Returns the median seconds of a training step of each; trains on, so it comes last."""
        images, labels = next(digits.batches(data, epochs=1))
        images, labels = tf.constant(images), tf.constant(labels)
        steps = [
            lambda training=training: training.train_step(images, labels).numpy()
            for training in (stock, fused)
        ]
        task = progress.add_task("timing both in turns", total=self.size.timed_steps + 3)
        return measure.interleaved_times(
            steps, self.size.timed_steps, lambda: progress.advance(task)
        )

    def _photographs(self):
        size = self.size.photograph_size
        self._heading(f"Keras's ResNet50, random weights, on two photographs of {size}x{size}")
        images = tf.constant(photographs.load(size))
        with self._progress() as progress:
            task = progress.add_task("building the model", total=1)
            model = photographs.make_model(size)
            progress.advance(task)
            stock, fused = (
                photographs.make_inference(model, decorate)
                for decorate in (tf.function, tf_fused_ops.function)
            )
            task = progress.add_task("tracing, then timing both in turns", total=2)
            results = []
            for infer in (stock, fused):
                results.append(infer(images).numpy())
                progress.advance(task)
            progress.update(task, total=2 + self.size.timed_photographs + 1)
            seconds = measure.interleaved_times(
                [lambda infer=infer: infer(images).numpy() for infer in (stock, fused)],
                self.size.timed_photographs,
                lambda: progress.advance(task),
                warm_up=1,
            )
        self._print_fused(stock, fused, images)
        self._print_times("both photographs", seconds)
        difference = measure.relative_difference(results[1], results[0])
        self._claim(
            f"the outputs agree within {LOGITS_TOLERANCE:g} of the greatest: {difference:.1e}",
            difference <= LOGITS_TOLERANCE,
        )
