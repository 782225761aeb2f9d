"""Tell trackio of a training: it has no logger of Lightning's kind of its own.

pip install trackio
python cli.py train --steps 3 --logger examples/trackio_logger.py:TrackioLogger
trackio show
"""

from lightning.pytorch.loggers.logger import Logger


class TrackioLogger(Logger):
    """Write the run into the local database of trackio, as the project memagent."""

    def __init__(self, name: str):
        import trackio

        super().__init__()
        self.run = trackio.init(project="memagent", name=name, resume="allow")

    @property
    def name(self) -> str:
        return "memagent"

    @property
    def version(self) -> str:
        return self.run.name

    def log_hyperparams(self, params) -> None:
        self.run.config.update({key: str(value) for key, value in params.items()})

    def log_metrics(self, metrics, step=None) -> None:
        # "step" is a word of trackio's own
        values = {key: value for key, value in metrics.items() if key != "step"}
        self.run.log(values, step=step)

    def finalize(self, status: str) -> None:
        self.run.finish()
