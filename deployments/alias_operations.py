"""What setting and deleting an alias does, step by step.

Runs under the same locks and the same agreement as operations on adapters, so that a name is an
adapter's or an alias's and never both.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from adapters import AdapterVersion
from deployments.aliases import AdapterAlias, AliasTarget, check_targets, split_adapter
from deployments.backend import DeleteAlias, SetAlias
from deployments.controller_settings import ControllerSettings
from deployments.errors import (
    AdapterNotFoundError,
    AliasNotFoundError,
    ClusterError,
    GenerationNotFoundError,
    NameConflictError,
)
from deployments.keyed_lock import KeyedLock
from deployments.operation_runner import OperationRunner
from deployments.operations import Operation, OperationKind, describe_request
from deployments.state_store import StateStore
from deployments.two_phase import TwoPhase


class AliasOperations:
    """Sets and deletes aliases."""

    def __init__(
        self,
        settings: ControllerSettings,
        store: StateStore,
        agreement: TwoPhase,
        runner: OperationRunner,
        names: KeyedLock,
    ) -> None:
        self.settings = settings
        self._store = store
        self._agreement = agreement
        self._runner = runner
        self._names = names

    async def set(self, asked: SetAlias, op_id: str) -> AdapterAlias:
        """Have every live replica take a name for these adapters."""
        check_targets(asked.targets)
        request = describe_request(*((each.adapter, each.weight) for each in asked.targets))
        called = self._runner.called(op_id, OperationKind.SET_ALIAS, asked, request)
        limit_s = self.settings.operation_timeout_s
        return await self._runner.run(called, lambda: self._set(asked, called), limit_s)

    async def delete(self, asked: DeleteAlias, op_id: str) -> AdapterAlias:
        """Have every live replica forget an alias."""
        called = self._runner.called(op_id, OperationKind.DELETE_ALIAS, asked, "")
        limit_s = self.settings.operation_timeout_s
        return await self._runner.run(called, lambda: self._delete(asked, called), limit_s)

    async def _set(self, asked: SetAlias, called: Operation) -> AdapterAlias:
        # With the targets, so that none is unloaded or loses the generation meanwhile.
        targets = (split_adapter(target.adapter)[0] for target in asked.targets)
        async with self._names.hold(asked.name, *targets):
            past = self._store.find_operation(called.op_id)
            if past is not None and past.phase.is_committed:
                return _alias(past, asked.targets)
            if asked.name in self._agreement.desired.adapters:
                raise NameConflictError(asked.name, "is an adapter's name and cannot be an alias.")
            self._find_versions(asked.targets)
            operation = await self._store.begin(called)
            try:
                prepared = await self._prepare(operation, asked.targets)
                alias = _alias(operation, asked.targets)
                committed = await self._agreement.commit_alias(operation, alias)
            except BaseException as error:
                reasons = error.reasons if isinstance(error, ClusterError) else None
                self._agreement.abort(operation, str(error) or type(error).__name__, reasons)
                raise
            self._agreement.end_prepares(prepared)
            await self._agreement.settle(committed)
            return alias

    async def _delete(self, asked: DeleteAlias, called: Operation) -> AdapterAlias:
        async with self._names.hold(asked.name):
            past = self._store.find_operation(called.op_id)
            alias = self._agreement.desired.aliases.get(asked.name)
            if past is not None and past.phase.is_committed:
                return alias or _alias(past, ())
            if alias is None:
                raise AliasNotFoundError(asked.name)
            operation = await self._store.begin(called)
            committed = await self._agreement.commit_alias(operation, None)
            await self._agreement.settle(committed)
            return alias

    def _find_versions(self, targets: Sequence[AliasTarget]) -> list[AdapterVersion]:
        return [self._find_version(target.adapter) for target in targets]

    def _find_version(self, adapter: str) -> AdapterVersion:
        name, generation = split_adapter(adapter)
        desired = self._agreement.desired
        current = desired.adapters.get(name)
        if current is None:
            raise AdapterNotFoundError(name, param="target")
        if generation is None:
            return current
        for version in (current, *desired.kept.get(name, ())):
            if version.generation == generation:
                return version
        error = GenerationNotFoundError(name, generation, current.generation)
        error.param = "target"
        raise error

    async def _prepare(
        self, operation: Operation, targets: Sequence[AliasTarget]
    ) -> list[Operation]:
        """Have every member check the targets' bytes; they stay in use until the prepares end."""
        prepares = [
            replace(
                operation,
                op_id=f"{operation.op_id}#{index}",
                name=version.name,
                digest=version.digest,
                source_uri=version.source_uri,
            )
            for index, version in enumerate(self._find_versions(targets))
        ]
        timeout_s = self.settings.prepare_timeout_s
        waits = [self._agreement.prepare(each, only=None, timeout_s=timeout_s) for each in prepares]
        try:
            await asyncio.gather(*waits)
        except BaseException:
            self._agreement.end_prepares(prepares)
            raise
        return prepares


def _alias(operation: Operation, targets: tuple[AliasTarget, ...]) -> AdapterAlias:
    return AdapterAlias(
        name=operation.name,
        targets=targets,
        generation=operation.generation,
        created_at=operation.started_at,
        created_by=operation.requested_by,
    )
