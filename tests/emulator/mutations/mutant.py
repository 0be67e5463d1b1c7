"""What breaks a kernel."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutant:
    """`old` becomes `new`, once, in a file of cuda/. Its name begins with its family."""

    name: str
    file: str
    old: str
    new: str = ""
    noticed: bool = True

    @property
    def family(self):
        return self.name.partition(":")[0]
