"""The scenarios of `peers.py` in words, for pages and plots.

`NxIN:OUT[:shared=S]` is N simultaneous requests with prompts of IN/2 to IN tokens (of IN if N is 1), of which the first
S are the same in all, and OUT output tokens each. `peers.json` has the unit after two spaces.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scenario:
    streams: int
    prompt: int
    """Most tokens of a prompt."""
    output: int
    shared: int = 0
    """First tokens that all prompts share."""

    @classmethod
    def parse(cls, row: str) -> "Scenario":
        """From a row of `peers.json`."""
        head, output, *options = row.partition("  ")[0].split(":")
        streams, prompt = head.split("x")
        shared = int(options[0].removeprefix("shared=")) if options else 0
        return cls(int(streams), int(prompt), int(output), shared)

    @property
    def brief(self) -> str:
        """What distinguishes it within a plot."""
        if self.output == 1:
            return f"{self.prompt:,}-token prompt"
        streams = "1 stream" if self.streams == 1 else f"{self.streams} streams"
        return f"{streams}, shared prefix" if self.shared else streams

    @property
    def words(self) -> str:
        if self.output == 1:
            return self.brief
        shared = f" ({self.shared} shared)" if self.shared else ""
        return f"{self.brief.partition(',')[0]}: {self.prompt} in{shared}, {self.output} out"
