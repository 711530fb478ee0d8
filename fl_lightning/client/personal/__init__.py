"""Parts of a model that stay with a client: layers, Ditto, APFL, fine-tuning."""
