"""The runner: executes plans on one device, by native kernels or torch, and returns sampled tokens."""

from array import array
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Generic

from numpy.typing import NDArray

from penstock.api.request import Adapter, MediaKind, TokenLogprob
from penstock.checkpoint.checkpoint import Checkpoint
from penstock.config.settings import Settings
from penstock.core.plan import ForwardPlan, NewBlocks, PromptLogprobsBatch, StepPlan, StepResult
from penstock.errors import DeviceLostError
from penstock.kernels.array_types import A
from penstock.kernels.block_bytes import BlockBytes
from penstock.kernels.ops import Ops
from penstock.kernels.tables import make_ops
from penstock.models.decoder import Decoder
from penstock.models.loading.stored_head import stored_tensor
from penstock.models.registry import load_model
from penstock.models.sizes import adaptable
from penstock.native import set_num_threads
from penstock.runner.forward import Forward, KVCache, make_forward
from penstock.runner.hidden_states import HiddenStates
from penstock.runner.torch_device import empty_device_cache, is_device_lost
from penstock.sampling.sampler import Sampler, token_logprobs
from penstock.system.start import Start

if TYPE_CHECKING:
    from penstock.models.audio_encoder import AudioEncoder
    from penstock.models.audio_tower import AudioTower
    from penstock.models.tower import Tower
    from penstock.runner.audio_runner import AudioRunner
    from penstock.runner.image_runner import ImageRunner


class BlockTables:
    """Mirrors the scheduler's block tables from the differences in plans."""

    def __init__(self, num_groups: int, num_slots: int) -> None:
        self._tables = [[array("i") for _ in range(num_slots)] for _ in range(num_groups)]

    def update(self, new_blocks: list[NewBlocks]) -> None:
        """Apply a plan's changes."""
        for group, slot, kept, blocks in new_blocks:
            table = self._tables[group][slot]
            assert kept <= len(table), f"slot {slot} has {len(table)} blocks; {kept} are to stay"
            del table[kept:]
            table.extend(blocks)

    def of(self, slots: list[int]) -> "list[list[array[int]]]":
        """Per cache group, the tables of these slots; valid until the next `update`."""
        return [[tables[slot] for slot in slots] for tables in self._tables]


class DeviceRunner(Generic[A]):
    """Holds the weights and the KV cache, and executes one step at a time.

    Raises:
        CheckpointError: the checkpoint's weights are damaged, incomplete or of an unknown kind.
        NoNativeKernelError: the model uses an operation that native kernels lack, and `settings.gap` does not say so.
    """

    def __init__(
        self, checkpoint: Checkpoint, settings: Settings, ops: Ops[A] | None = None, start: Start | None = None
    ) -> None:
        """
        Args:
            ops: operations to compute with; None: the device's fastest, with the start's allocator.
            start: what was prepared for loading the model.
        """
        start = start or Start()
        self._device = settings.device
        self._max_rows = settings.max_num_seqs
        self._ops: Ops[A] = ops or make_ops(
            self._device, gap=settings.gap, widened_weights=settings.widened_weights, allocator=start.allocator
        )
        set_num_threads(settings.threads)  # torch's, too, if the operations are torch's
        self._load(checkpoint, settings, start)
        self._block_tables = BlockTables(len(settings.memory.groups), settings.max_num_seqs)
        self._sampler = Sampler(self._ops, settings.max_num_seqs)

    def _load(self, checkpoint: Checkpoint, settings: Settings, start: Start) -> None:
        """Load the model, and create its cache and forward pass."""
        with self._ops.inference():
            self._model = load_model(checkpoint, settings, self._ops, start)
            self._adapters = None
            if settings.memory.adapters:
                from penstock.runner.adapters import LoadedAdapters  # here: few engines take adapters

                maps = adaptable(self._model.spec, settings.dtype)
                self._adapters = LoadedAdapters(
                    self._model, maps, self._ops, settings.dtype, self._device, partial(self._base_tensor, checkpoint)
                )
            self._cache = KVCache.of_model(self._model.spec, settings, self._ops)
            self.hidden = self._hidden_states(settings)
            """None if not needed."""
            self.images: ImageRunner[A] | None = None
            """None: the model takes neither images nor sounds in prompts."""
            self._audio: AudioRunner[A] | None = None
            if self._model.towers:
                self.images, self._audio = self._run_towers(self._model.towers, settings)
            if self._audio is not None:
                self._cache.attend_to(self._audio, self._model.spec)
            self._forward: Forward[A] = make_forward(
                self._model,
                self._cache,
                self._ops,
                self._device,
                loaded=self._adapters,
                max_tokens=settings.max_num_batched_tokens,
                max_rows=self._max_rows,
                hidden=self.hidden,
                images=self.images,
                audio=self._audio,
            )

    def _run_towers(
        self, towers: "Mapping[MediaKind, Tower[A] | AudioEncoder[A] | AudioTower[A]]", settings: Settings
    ) -> "tuple[ImageRunner[A] | None, AudioRunner[A] | None]":
        """The runner of the model's encoders: that of features in prompts, or that of windows of audio."""
        from penstock.models.audio_tower import AudioTower  # here: few models have a tower
        from penstock.runner.audio_runner import AudioRunner
        from penstock.runner.image_runner import ImageRunner

        of_prompts = {kind: tower for kind, tower in towers.items() if not isinstance(tower, AudioTower)}
        if of_prompts:
            return ImageRunner(of_prompts, self._ops, settings), None
        (tower,) = towers.values()
        assert isinstance(tower, AudioTower)
        return None, AudioRunner(tower, self._ops, settings)

    def _base_tensor(self, checkpoint: Checkpoint, matrix: str) -> NDArray[Any] | None:
        """The weight of the embedding or the output projection `matrix`, as the checkpoint stores it."""
        spec = self._model.spec
        is_tied = matrix == spec.names.output and spec.tie_embeddings
        name = f"{spec.names.embedding if is_tied else matrix}.weight"
        return None if checkpoint.gguf is not None else stored_tensor(checkpoint.path, spec.names, name)

    def _hidden_states(self, settings: Settings) -> HiddenStates[A] | None:
        if settings.speculation is None or not settings.speculation.mtp:
            return None
        memory, dtype = settings.memory, settings.dtype
        size, num_own = self._model.spec.hidden_size, settings.max_num_seqs
        return HiddenStates(self._ops, memory.num_blocks, memory.block_size, num_own, size, dtype, self._device)

    @property
    def model(self) -> Decoder[A]:
        return self._model

    @property
    def ops(self) -> Ops[A]:
        """The operations it computes with."""
        return self._ops

    @property
    def blocks(self) -> list[BlockBytes] | None:
        """The KV cache's blocks by groups, as bytes; None: there are states, too."""
        return self._cache.blocks

    def follow(self, forward: ForwardPlan, logits_of: list[int]) -> None:
        """The part of `execute` before sampling, for ranks other than rank 0; then the `logits` of these rows."""
        with self._ops.inference():
            self._encode(forward)
            if self._compute(forward) is not None:
                # Discarded here: the output projection is sharded, so each rank has to take part in it.
                for part in self._chunks(len(logits_of)):
                    self._forward.logits(logits_of[part])

    def execute(self, plan: StepPlan) -> StepResult:
        """Copy blocks, compute the plan's tokens, store their keys and values, and sample the sampled rows.

        Raises:
            DeviceLostError: no further plan can be executed.
        """
        try:
            with self._ops.inference():
                broken = self._encode(plan.forward)
                logits = self._compute(plan.forward)
                result = StepResult([])
                if logits is not None and len(plan.samples):
                    result = self._sampler.sample(logits, plan.samples)
                if logits is not None and len(plan.prompt_logprobs):
                    result.prompt_logprobs = self._prompt_logprobs(plan.prompt_logprobs)
        except Exception as error:
            if is_device_lost(error):
                raise DeviceLostError(f"the device is lost: {error}") from error
            raise
        result.broken_images = broken
        return result

    def _encode(self, forward: ForwardPlan) -> list[bytes]:
        """Compute layers of the tower; returns the digests of images whose features are not finite."""
        encoder = self.images or self._audio
        if encoder is None:
            assert not forward.encode, "this model takes no images"
            return []
        return encoder.encode(forward)

    def _compute(self, forward: ForwardPlan) -> A | None:
        """The step's logits; None if it only updates tables and copies blocks."""
        # Also in a step without tokens: the next one has only the differences to this.
        self._block_tables.update(forward.new_blocks)
        # Before the step writes to one of the two blocks, which a fork has shared so far.
        if forward.block_copies:
            self._cache.copy(forward.block_copies)
            if self.hidden is not None:
                pairs = [(copy.source, copy.target) for copy in forward.block_copies if copy.group == 0]
                self.hidden.copy_blocks(pairs)
        if not forward.query_lens:
            return None
        return self._forward.run(forward, self._block_tables.of(forward.slots))

    def _chunks(self, count: int) -> Iterator[slice]:
        """Chunks of `count` rows of logits, of the size in the memory plan."""
        for begin in range(0, count, self._max_rows):
            yield slice(begin, min(begin + self._max_rows, count))

    def _prompt_logprobs(self, batch: PromptLogprobsBatch) -> list[TokenLogprob]:
        """Log-probabilities of a prompt's tokens, chunk by chunk."""
        entries: list[TokenLogprob] = []
        for part in self._chunks(len(batch)):
            logits = self._forward.logits(batch.rows[part])
            entries += token_logprobs(self._ops, logits, batch.token_ids[part], batch.counts[part])
        return entries

    def load_adapter(self, adapter: Adapter) -> None:
        """Load an adapter for later steps; may be called in any thread.

        Raises:
            AdapterError: it cannot be read, or its content has changed.
        """
        assert self._adapters is not None, "no memory was planned for adapters"
        self._adapters.load(adapter)

    def drop_adapter(self, adapter: Adapter) -> None:
        """Free an adapter's memory; called between steps."""
        assert self._adapters is not None
        self._adapters.drop(adapter)

    def close(self) -> None:
        """Free the memory; the runner cannot be used afterwards."""
        del self._model, self._cache, self._forward, self.hidden, self.images, self._audio
        empty_device_cache(self._device)
