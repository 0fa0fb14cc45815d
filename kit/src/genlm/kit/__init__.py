"""Parts that engines share: what two plugins need, and the core itself does not decide."""
