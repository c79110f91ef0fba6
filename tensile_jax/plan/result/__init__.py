"""What a search ends with: a choice becomes a plan, and a plan is simulated, checked, and compared with others."""
