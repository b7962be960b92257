"""What several tests share: tiny models, adapters made by PEFT, and the oracles."""
