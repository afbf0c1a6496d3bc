"""BaseEnv: the base class of environments. A subclass says what its items are and how one is rolled out and scored."""

from stepwell.envs.environment import Environment


class BaseEnv(Environment):
    @classmethod
    def cli(cls) -> None:
        """The command line: serve, process or evaluate."""

        main(cls)

    async def env_manager(self) -> None:
        """Serves the trainer, as `serve` does."""
        from stepwell.envs.loop import lifecycle

        await lifecycle.serve(self)
