"""From a variant to a kernel that can be launched: compiler, cache of cubins, modules of a device."""
