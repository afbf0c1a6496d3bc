"""How a process that has no link process of its own reaches the DataPool."""

from stepwell.config.rewards import RewardSettings
from stepwell.config.sections import PoolSection, ServerSection
from stepwell.pool.client import PoolClient
from stepwell.pool.client.link import LinkClient
from stepwell.pool.client.network_link import NetworkLink
from stepwell.pool.client.ray_cluster import join_ray


def join_pool(settings: PoolSection | RewardSettings) -> PoolClient:
    """By a link over the network, if the settings name one; otherwise this process joins Ray."""
    link = network_link(settings) if isinstance(settings, ServerSection) else None
    if link is None:
        join_ray(settings.ray_address, settings.ray_namespace)
    else:
        link.start()
    return PoolClient(settings.data_pool_name, settings.ray_namespace, transport=link)


def network_link(settings: ServerSection) -> LinkClient | None:
    if settings.link is None or settings.link_secret_file is None:
        return None
    return NetworkLink(*settings.link, secret_file=settings.link_secret_file, ca_file=settings.link_ca_file)
