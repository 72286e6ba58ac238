"""The block tables of the sequence slots, one a cache group, kept from step to step."""

from array import array

from penstock.core.plan import NewBlocks


class BlockTables:
    """Follows the scheduler's tables by the differences that plans carry."""

    def __init__(self, num_groups: int, num_slots: int) -> None:
        self._tables = [[array("i") for _ in range(num_slots)] for _ in range(num_groups)]

    def update(self, new_blocks: list[NewBlocks]) -> None:
        """Take in what a plan changes."""
        for group, slot, kept, blocks in new_blocks:
            table = self._tables[group][slot]
            assert kept <= len(table), f"slot {slot} has {len(table)} blocks, of which {kept} are to stay"
            del table[kept:]
            table.extend(blocks)

    def of(self, slots: list[int]) -> "list[list[array[int]]]":
        """For each cache group the tables of these slots, to be read before the next `update`."""
        return [[tables[slot] for slot in slots] for tables in self._tables]
