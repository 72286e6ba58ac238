"""LoRA adapters in PEFT's format: folders, checked against the model that they modify. No torch."""
