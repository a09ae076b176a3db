"""Builds the adapter sources that a configuration describes, the same in every process."""

from deployments.config import DeploymentConfig
from deployments.sources import AdapterSources, Resolver
from resolvers.filesystem import FilesystemResolver


def build_sources(config: DeploymentConfig) -> AdapterSources:
    """Open every source of a deployment."""
    resolvers: list[Resolver] = []
    if config.adapters.directories:
        resolvers.append(FilesystemResolver(config.adapters.directories))
    return AdapterSources(
        config.public_model_id, resolvers=resolvers, allowed_roots=config.adapters.roots
    )
