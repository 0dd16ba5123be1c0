"""Which rank has which experts, by how many tokens each of them computes."""

from headrace.executor.parallel.load_balancing.balancer import BalancedExperts, ExpertBalancer, costs

__all__ = ["BalancedExperts", "ExpertBalancer", "costs"]
