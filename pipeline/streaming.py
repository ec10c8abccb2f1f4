"""Hidden states that never touch the disk (extract.mode: streamed).

    with open_states(params, verifier) as states:      either kind, as the params say
        states.of(sequences, …)                        those that have states
        states.transfer(keys)                          how speculators' datasets get them

extract has written which sequences there are (plan.json) and proved that the server is right. Here
train and evaluate ask a server for the states of a sequence whenever they need them, and again in
each epoch. A server of the stage's own lives as long as the block does.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from hs_connectors import HiddenStatesTransfer

from pipeline.errors import ServerStopped
from pipeline.manifest import PLAN, load_plan, with_states
from pipeline.params import Params
from pipeline.records import HIDDEN_STATES
from pipeline.resume import one_writer
from pipeline.shards import HiddenStates
from pipeline.staging import take
from pipeline.states_server import states_endpoints
from pipeline.verifier import VerifierIdentity


class StreamedStates:
    """The sequences of plan.json, whose states a server has."""

    def __init__(
        self, folder: Path, base_urls: list[str], model: str, hidden_size: int, timeout_s: float
    ) -> None:
        self.base_urls, self.model, self.timeout_s = base_urls, model, timeout_s
        self._folder, self._hidden_size = folder, hidden_size
        self._plan = load_plan(folder)

    def of(self, sequences: Dataset, layer_ids: list[int], fingerprint: str) -> Dataset:
        """The sequences of the plan. Raises DataError as `with_states` does."""
        return with_states(sequences, {PLAN: self._plan}, layer_ids, fingerprint, self._folder)

    def transfer(self, keys: list[str]) -> "StreamTransfer":
        """Keys are not looked up: each row is asked for."""
        del keys
        return StreamTransfer(len(self._plan.layer_ids), self._hidden_size, self.timeout_s)


class StreamTransfer(HiddenStatesTransfer):
    """Fetches what the server staged for a request, and deletes it."""

    def __init__(self, num_layers: int, hidden_size: int, timeout_s: float) -> None:
        self._shape, self._timeout_s = (num_layers, hidden_size), timeout_s

    def get_cached(self, file_idx: int) -> None:
        """Nothing is."""

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Raises Rejected or ValueError; tokens and finite values are the caller's to check."""
        payload = asyncio.run(take(hs_transfer_params["hidden_states_path"], self._timeout_s))
        found = tuple(payload["hidden_states"].shape[1:])  # of [T, 4, H]
        if found != self._shape:
            raise ValueError(f"states of shape {found} a token instead of {self._shape}")
        return payload


@contextmanager
def open_states(
    params: Params, verifier: VerifierIdentity
) -> Iterator[HiddenStates | StreamedStates]:
    """What extract left: shards, or a plan and then a server.

    Raises:
        ServerStopped: the server ended, whatever else went wrong because of that.
    """
    if params.extract.mode == "stored":
        yield HiddenStates(HIDDEN_STATES)
        return
    # As writer, though nothing is written: two servers would share one staging folder.
    with one_writer(HIDDEN_STATES), states_endpoints(params, verifier) as endpoints:
        try:
            yield StreamedStates(
                HIDDEN_STATES,
                [endpoint.base_url for endpoint in endpoints],
                endpoints[0].model,
                verifier.hidden_size,
                params.extract.timeout_s,
            )
        finally:
            # Also when all went well, as it seems: what came after its end was left out.
            if dead := next((endpoint for endpoint in endpoints if endpoint.died), None):
                raise ServerStopped(f"the server ended: {dead.last_words}")
