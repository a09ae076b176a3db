"""Builds the adapter sources that a configuration describes, the same in every process."""

from collections.abc import Sequence
from dataclasses import replace

from adapters import LoRARequest
from deployments.config import DeploymentConfig
from deployments.metrics.resolver_timing import ObserveResolver, TimedFetcher, TimedResolver
from deployments.push_fetcher import PushFetcher, ReadPushed
from deployments.push_store import PUSH_SCHEME, PushStore
from deployments.sources import AdapterSources
from resolvers.base import SourceFetcher, UriResolver
from resolvers.chain import ResolverChain
from resolvers.registry import build_link
from resolvers.store import AdapterStore


def build_sources(
    config: DeploymentConfig,
    observe: ObserveResolver = lambda *_: None,
    *,
    read_pushed: ReadPushed | None = None,
) -> AdapterSources:
    """Open every source of a deployment; ``observe`` is told how long each of them takes.

    ``read_pushed`` asks the controller for a pushed adapter's files; it needs none itself.
    """
    settings = config.adapters
    store = AdapterStore(settings.store_path, settings.store_max_bytes, settings.max_adapter_bytes)
    links = [build_link(entry, store) for entry in settings.entries]
    fetchers = [link.resolver for link in links if isinstance(link.resolver, UriResolver)]
    for root in settings.roots:
        # What operators may load by URI need not lie where names are looked up.
        if root.startswith("s3://") and not any(fetcher.covers(root) for fetcher in fetchers):
            fetcher = build_link({"name": "s3", "uri": root}, store).resolver
            assert isinstance(fetcher, UriResolver)
            fetchers.append(fetcher)
    by_scheme: dict[str, SourceFetcher] = {f.scheme: FetcherGroup(fetchers) for f in fetchers}
    if read_pushed is not None:
        local = PushStore(config.cluster.push_path)
        by_scheme[PUSH_SCHEME] = PushFetcher(store, local, read_pushed)
    return AdapterSources(
        config.public_model_id,
        store,
        resolver=ResolverChain(
            [
                replace(link, resolver=TimedResolver(link.name, link.resolver, observe))
                for link in links
            ]
        ),
        allowed_roots=settings.roots,
        fetchers={
            scheme: TimedFetcher(scheme, fetcher, observe) for scheme, fetcher in by_scheme.items()
        },
        open_timeout_s=config.cluster.prepare_timeout_s,
    )


class FetcherGroup:
    """Several fetchers of URIs: each URI goes to the one whose place it is in."""

    def __init__(self, fetchers: Sequence[UriResolver]) -> None:
        self._fetchers = fetchers

    async def fetch(self, uri: str, lora_name: str, digest: str | None) -> LoRARequest:
        """Have the fetcher whose credentials and endpoint are meant for this URI fetch it."""
        fetcher = next((fetcher for fetcher in self._fetchers if fetcher.covers(uri)), None)
        if fetcher is None:
            raise FileNotFoundError(f"no resolver is configured for {uri}")
        return await fetcher.fetch(uri, lora_name, digest)
