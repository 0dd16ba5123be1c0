"""Expert-parallel load balancing: places a layer's experts on ranks by the number of tokens that each computes."""

from headrace.executor.parallel.load_balancing.balancer import BalancedExperts, ExpertBalancer, costs

__all__ = ["BalancedExperts", "ExpertBalancer", "costs"]
