"""Mixture of experts: canonical modules, what tokens were routed to, the load-balancing loss."""
