"""Products that are symmetric, so that only one triangle is computed."""
