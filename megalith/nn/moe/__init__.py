"""Mixture of experts (MoE): router, experts, load balancing and the MoE layer."""
