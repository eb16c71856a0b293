

def mesh(devices=None):
    """The plan's mesh. `devices` are all devices of the job, in the order of the plan's cluster: node by node."""
    return _mesh(MESH, DEVICES, devices)


def input_specs(inputs):
    """The PartitionSpec of every leaf of `inputs`, which maps the names of the loss's arguments to their trees."""
    return _specs(inputs, INPUTS, None)


def shard_parameters(params, mesh):
    """Places parameters as the plan stores them."""
    return jax.device_put(params, shardings(parameter_specs(params, PARAMETERS), mesh), may_alias=False)


def shard_inputs(inputs, mesh):
    """Places the inputs of a step. `inputs` maps the names of the loss's arguments to their trees."""
    inputs = _with_samples(inputs, INPUTS)
    return jax.device_put(inputs, shardings(input_specs(inputs), mesh))


def init_state(optimizer, params, mesh):
    """Makes the state of an optimizer (`init` and `update`, as in optax) where the plan stores it."""
    specs = state_specs(jax.eval_shape(optimizer.init, params), params, parameter_specs(params, STATE))
    return jax.jit(optimizer.init, out_shardings=shardings(specs, mesh))(params)


def model(mesh):
    """The loss that was planned, as a function of parameters and inputs: with the plan's layouts and recomputation."""

    def loss(params, inputs, totals={}):
        values = dict(_named(inputs, None)) | totals
        return _stage0(_at(mesh), _by_name(params, _arguments(params, PARAMETERS), PARAMETERS), values)["loss"]

    return loss


def loss_and_gradients(mesh, loss=None):
    """A function of parameters and inputs that gives the loss and the gradients of a step, accumulated over microbatches.

    `loss` is the function that was planned: its arguments have the names of the plan. It computes with the layouts of
    parameters alone, and recomputes what it says itself. Without it, the plan's own model is differentiated.
    """
    own = model(mesh)

    def of_microbatch(params, inputs, totals):
        if loss is None:
            return own(params, inputs, totals)
        params = lax.with_sharding_constraint(params, shardings(parameter_specs(params, USED), mesh))
        arguments = {ARGUMENTS[0]: params} if len(ARGUMENTS) == 1 else params
        return loss(**arguments, **{name: tree for name, tree in inputs.items() if name != SAMPLES})

    def constrained(gradients):
        specs = parameter_specs(gradients, GRADIENTS)
        return lax.with_sharding_constraint(gradients, shardings(specs, mesh))

    def of_step(params, inputs):
        inputs = lax.with_sharding_constraint(inputs, shardings(input_specs(inputs), mesh))
        if MICROBATCHES == 1:
            value, gradients = jax.value_and_grad(of_microbatch)(params, inputs, {})
            return value, constrained(gradients)
        parts = _microbatches(inputs, mesh)
        totals = {}
        if loss is None and TOTALS[0]:
            shares = [TOTALS[0](dict(_named(_picked(parts, inputs, i), None))) for i in range(MICROBATCHES)]
            totals = _total(shares)

        def add(sums, i):
            value, gradients = jax.value_and_grad(of_microbatch)(params, _picked(parts, inputs, i), totals)
            return (sums[0] + value, constrained(jax.tree.map(jnp.add, sums[1], gradients))), None

        dtype = jax.eval_shape(of_microbatch, params, _picked(parts, inputs, 0), totals).dtype
        # Sums of half-precision gradients are in single precision.
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, "float32")), params)
        zeros = (jnp.zeros((), dtype), constrained(zeros))
        (value, gradients), _ = lax.scan(add, zeros, jnp.arange(MICROBATCHES))
        if LOSS_IS_MEAN:
            value, gradients = jax.tree.map(lambda x: x / MICROBATCHES, (value, gradients))
        return value, constrained(jax.tree.map(lambda g, p: g.astype(p.dtype), gradients, params))

    return of_step


def train_step(optimizer, mesh, params, state, inputs, loss=None):
    """The jitted step: (params, state, inputs) -> (params, state, loss). It donates parameters and state.

    `optimizer` has `init` and `update`, as in optax. `params`, `state` and `inputs` tell the structure of the trees;
    arrays and ShapeDtypeStructs will do. `loss` is as in `loss_and_gradients`.
    """
    stored = shardings(parameter_specs(params, PARAMETERS), mesh)
    sharded = shardings(parameter_specs(params, STATE), mesh)
    of_state = shardings(state_specs(state, params, parameter_specs(params, STATE)), mesh)
    of_inputs = shardings(input_specs(inputs), mesh)
    gradients_of = loss_and_gradients(mesh, loss)
    named = _named(params, _arguments(params, PARAMETERS))
    frozen = [name in FROZEN or f"{name}[0]" in FROZEN for name, _ in named]

    def step(params, state, inputs):
        value, gradients = gradients_of(params, inputs)
        return *_updated(optimizer, gradients, state, params, sharded, frozen), value

    return jax.jit(
        step,
        in_shardings=(stored, of_state, of_inputs),
        out_shardings=(stored, of_state, NamedSharding(mesh, P())),
        donate_argnums=(0, 1),
    )


def _microbatches(inputs, mesh):
    """Inputs with a dimension of microbatches in front. A microbatch takes samples of every device, so none move."""
    parts = []
    for (name, x), spec in zip(_named(inputs, None), _leaves(input_specs(inputs))):
        dim, rows = BATCH_DIMS.get(name, (None, 0))
        if dim is not None:
            samples = x.shape[dim] // rows
            split = (samples // MICROBATCHES, MICROBATCHES, rows)
            x = x.reshape(x.shape[:dim] + split + x.shape[dim + 1 :])
            x = jnp.moveaxis(x, dim + 1, 0)
            x = x.reshape(x.shape[: dim + 1] + (split[0] * rows,) + x.shape[dim + 3 :])
            x = lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, *spec)))
        parts.append(x)
    return parts


def _picked(parts, inputs, i):
    """The inputs of microbatch `i`."""
    names = [name for name, _ in _named(inputs, None)]
    picked = [
        lax.dynamic_index_in_dim(x, i, 0, keepdims=False) if name in BATCH_DIMS else x for name, x in zip(names, parts)
    ]
    return jax.tree.unflatten(jax.tree.structure(inputs), picked)
