"""What programs use beside functions and collectives: update rules, and training functions of them."""
