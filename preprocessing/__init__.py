"""From folders of pictures to a dataset folder. Each script explains itself with --help."""
