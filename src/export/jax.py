

def mesh(devices=None):
    """The plan's mesh. `devices` are all devices of the job, in the order of the plan's cluster: node by node."""
    devices = jax.devices() if devices is None else devices
    if len(devices) <= max(DEVICES):
        raise ValueError(f"the plan has {len(DEVICES)} devices, but JAX has {len(devices)}")
    array = numpy.array([devices[i] for i in DEVICES]).reshape(tuple(MESH.values()))
    return Mesh(array, tuple(MESH), axis_types=(AxisType.Auto,) * len(MESH))


def parameter_specs(params, table=PARAMETERS):
    """The PartitionSpec of every leaf of `params`, whose key paths are the plan's names.

    If several arguments of the loss hold parameters, `params` maps their names to their trees. `table` is PARAMETERS,
    USED, GRADIENTS or STATE.
    """
    return _specs(params, table, ARGUMENTS if len(ARGUMENTS) == 1 else None)


def input_specs(inputs):
    """The PartitionSpec of every leaf of `inputs`, which maps the names of the loss's arguments to their trees."""
    return _specs(inputs, INPUTS, None)


def state_specs(state, params):
    """The PartitionSpec of every leaf of an optimizer's state.

    A leaf whose key path ends with that of a parameter, and that has its shape, is stored as STATE says. All other
    leaves, such as counters, are replicated.
    """
    of_params = parameter_specs(params, STATE)
    known = {
        _keys(path): (spec, leaf.shape)
        for (path, leaf), spec in zip(tree_flatten_with_path(params)[0], _leaves(of_params))
    }

    def spec(path, leaf):
        keys = _keys(path)
        for start in range(len(keys) + 1):
            found = known.get(keys[start:])
            if found and found[1] == leaf.shape:
                return found[0]
        return P()

    return jax.tree_util.tree_map_with_path(spec, state)


def shardings(specs, mesh):
    """The NamedSharding of every PartitionSpec of a tree."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec)


def shard_parameters(params, mesh):
    """Places parameters as the plan stores them."""
    return jax.device_put(params, shardings(parameter_specs(params), mesh))


def shard_inputs(inputs, mesh):
    """Places the inputs of a step. `inputs` maps the names of the loss's arguments to their trees."""
    return jax.device_put(inputs, shardings(input_specs(inputs), mesh))


def init_state(optimizer, params, mesh):
    """Makes the state of an optimizer (`init` and `update`, as in optax) where the plan stores it."""
    specs = state_specs(jax.eval_shape(optimizer.init, params), params)
    return jax.jit(optimizer.init, out_shardings=shardings(specs, mesh))(params)


def loss_and_gradients(loss, mesh):
    """A function of parameters and inputs that gives the loss and the gradients of a step, accumulated over microbatches.

    `loss` is the function that was planned: its arguments have the names of the plan.
    """

    def of_microbatch(params, inputs):
        params = jax.lax.with_sharding_constraint(params, shardings(parameter_specs(params, USED), mesh))
        arguments = {ARGUMENTS[0]: params} if len(ARGUMENTS) == 1 else params
        return loss(**arguments, **inputs)

    def constrained(gradients):
        specs = parameter_specs(gradients, GRADIENTS)
        return jax.lax.with_sharding_constraint(gradients, shardings(specs, mesh))

    def of_step(params, inputs):
        inputs = jax.lax.with_sharding_constraint(inputs, shardings(input_specs(inputs), mesh))
        if MICROBATCHES == 1:
            value, gradients = jax.value_and_grad(of_microbatch)(params, inputs)
            return value, constrained(gradients)
        parts = _microbatches(inputs, mesh)

        def add(sums, i):
            value, gradients = jax.value_and_grad(of_microbatch)(params, _picked(parts, inputs, i))
            return (sums[0] + value, constrained(jax.tree.map(jax.numpy.add, sums[1], gradients))), None

        dtype = jax.eval_shape(of_microbatch, params, _picked(parts, inputs, 0)).dtype
        # Sums of half-precision gradients are in single precision.
        zeros = jax.tree.map(lambda p: jax.numpy.zeros(p.shape, jax.numpy.promote_types(p.dtype, "float32")), params)
        zeros = (jax.numpy.zeros((), dtype), constrained(zeros))
        (value, gradients), _ = jax.lax.scan(add, zeros, jax.numpy.arange(MICROBATCHES))
        if LOSS_IS_MEAN:
            value, gradients = jax.tree.map(lambda x: x / MICROBATCHES, (value, gradients))
        return value, constrained(jax.tree.map(lambda g, p: g.astype(p.dtype), gradients, params))

    return of_step


def train_step(loss, optimizer, mesh, params, state, inputs):
    """The jitted step: (params, state, inputs) -> (params, state, loss). It donates parameters and state.

    `optimizer` has `init` and `update`, as in optax. `params`, `state` and `inputs` tell the structure of the trees;
    arrays and ShapeDtypeStructs will do.
    """
    stored = shardings(parameter_specs(params), mesh)
    sharded = shardings(parameter_specs(params, STATE), mesh)
    of_state = shardings(state_specs(state, params), mesh)
    of_inputs = shardings(input_specs(inputs), mesh)
    gradients_of = loss_and_gradients(loss, mesh)
    named = _named(params, ARGUMENTS if len(ARGUMENTS) == 1 else None)
    frozen = [name in FROZEN or f"{name}[0]" in FROZEN for name, _ in named]

    def step(params, state, inputs):
        value, gradients = gradients_of(params, inputs)
        gradients = jax.lax.with_sharding_constraint(gradients, sharded)
        own = jax.lax.with_sharding_constraint(params, sharded)
        updates, state = optimizer.update(gradients, state, own)
        tree = jax.tree.structure(params)
        added = [
            p if keep else (p + u).astype(p.dtype) for p, u, keep in zip(_leaves(own), _leaves(updates), frozen)
        ]
        return jax.tree.unflatten(tree, added), state, value

    return jax.jit(
        step,
        in_shardings=(stored, of_state, of_inputs),
        out_shardings=(stored, of_state, NamedSharding(mesh, P())),
        donate_argnums=(0, 1),
    )


def _is_spec(x):
    return isinstance(x, P)


def _leaves(tree):
    return jax.tree.leaves(tree, is_leaf=_is_spec)


def _keys(path):
    return tuple(jax.tree_util.keystr((key,)) for key in path)


def _near(name, table):
    near = difflib.get_close_matches(name, table, n=3)
    return f"; similar names are {', '.join(near)}" if near else ""


def _named(tree, arguments):
    """The leaves of a tree by the names of the plan: an argument, and the key path in it."""
    named = []
    for path, leaf in tree_flatten_with_path(tree)[0]:
        if arguments is None:
            named.append((str(path[0].key) + keystr(path[1:]), leaf))
        else:
            named.append((arguments[0] + keystr(path), leaf))
    return named


def _specs(tree, table, arguments):
    specs, missing = [], set(table)
    for name, leaf in _named(tree, arguments):
        if name in table:
            spec = table[name]
            missing.discard(name)
        else:
            spec = _stacked(name, leaf, table)
            missing -= {f"{name}[{row}]" for row in range(leaf.shape[0])} if leaf.ndim else set()
        if len(spec) > leaf.ndim:
            raise ValueError(f"'{name}' has {leaf.ndim} dimensions, in the plan {len(spec)}")
        specs.append(spec)
    if missing:
        raise KeyError(f"the tree has no {', '.join(sorted(missing)[:4])}, which the plan lays out")
    return jax.tree.unflatten(jax.tree.structure(tree), specs)


def _stacked(name, leaf, table):
    """The PartitionSpec of a stack of layers, whose rows the plan lays out one by one."""
    rows = [table.get(f"{name}[{row}]") for row in range(leaf.shape[0] if leaf.ndim else 0)]
    if not rows or None in rows:
        raise KeyError(f"the plan has no '{name}'{_near(name, table)}")
    if any(row != rows[0] for row in rows):
        raise ValueError(f"the plan lays out the layers of '{name}' differently, which one array cannot have")
    return P(None, *rows[0])


def _microbatches(inputs, mesh):
    """Inputs with a dimension of microbatches in front. A microbatch takes samples of every device, so none move."""
    parts = []
    for (name, x), spec in zip(_named(inputs, None), _leaves(input_specs(inputs))):
        dim, rows = BATCH_DIMS.get(name, (None, 0))
        if dim is not None:
            samples = x.shape[dim] // rows
            split = (samples // MICROBATCHES, MICROBATCHES, rows)
            x = x.reshape(x.shape[:dim] + split + x.shape[dim + 1 :])
            x = jax.numpy.moveaxis(x, dim + 1, 0)
            x = x.reshape(x.shape[: dim + 1] + (split[0] * rows,) + x.shape[dim + 3 :])
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, *spec)))
        parts.append(x)
    return parts


def _picked(parts, inputs, i):
    """The inputs of microbatch `i`."""
    names = [name for name, _ in _named(inputs, None)]
    picked = [
        jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False) if name in BATCH_DIMS else x
        for name, x in zip(names, parts)
    ]
    return jax.tree.unflatten(jax.tree.structure(inputs), picked)
