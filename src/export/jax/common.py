def parameter_specs(params, table):
    """The PartitionSpec of every leaf of `params`, whose key paths are the plan's names.

    If several arguments of the loss hold parameters, `params` maps their names to their trees. A dictionary from the
    plan's names to arrays will do as well. `table` is PARAMETERS, GRADIENTS or STATE.
    """
    return _specs(params, table, _arguments(params, table))


def state_specs(state, params, of_params):
    """The PartitionSpec of every leaf of an optimizer's state. `of_params` are those of `params` in STATE.

    A leaf whose key path ends with that of a parameter, and that has its shape, is stored as STATE says. All other
    leaves, such as counters, are replicated.
    """
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


def _mesh(axes, positions, devices):
    devices = jax.devices() if devices is None else devices
    if len(devices) <= max(positions):
        raise ValueError(f"the plan has {max(positions) + 1} devices, but JAX has {len(devices)}")
    array = numpy.array([devices[i] for i in positions]).reshape(tuple(axes.values()))
    return Mesh(array, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def _at(mesh):
    """The function that lays out a value on a mesh."""
    return lambda x, spec: lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def keep(x):
    """Marks a value that the backward pass finds kept. It computes all others of a layer again."""
    return checkpoint_name(x, "kept")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2, 3))
def move(at, x, to, back):
    """A value in the layout in which an op reads it. Its cotangent goes straight to the layout `back`, if there is one."""
    return at(x, to)


def _moved_back(at, to, back, _, cotangent):
    return (cotangent if back is None else at(cotangent, back),)


move.defvjp(lambda at, x, to, back: (at(x, to), None), _moved_back)


def _layer(function, at, *operands):
    policy = jax.checkpoint_policies.save_only_these_names("kept")
    return jax.checkpoint(functools.partial(function, at), policy=policy)(*operands)


def _total(shares):
    """The sums over all microbatches of values that each of them has a share of."""
    return {key: sum(share[key] for share in shares) for key in shares[0]}


def _updated(optimizer, gradients, state, params, stored, frozen):
    """Parameters and state after the optimizer's update, which runs in the layout of its state."""
    gradients = lax.with_sharding_constraint(gradients, stored)
    own = lax.with_sharding_constraint(params, stored)
    updates, state = optimizer.update(gradients, state, own)
    added = [p if keep else (p + u).astype(p.dtype) for p, u, keep in zip(_leaves(own), _leaves(updates), frozen)]
    return jax.tree.unflatten(jax.tree.structure(params), added), state


def _is_spec(x):
    return isinstance(x, P)


def _leaves(tree):
    return jax.tree.leaves(tree, is_leaf=_is_spec)


def _keys(path):
    return tuple(jax.tree_util.keystr((key,)) for key in path)


def _near(name, table):
    near = difflib.get_close_matches(name, table, n=3)
    return f"; similar names are {', '.join(near)}" if near else ""


def _with_samples(inputs, table):
    """The inputs, with the numbers of samples in the batch where the model draws random numbers by them."""
    if SAMPLES not in table or SAMPLES in inputs:
        return inputs
    return inputs | {SAMPLES: numpy.arange(GLOBAL_BATCH * BATCH_DIMS[SAMPLES][1], dtype="int32")}


def _arguments(params, table):
    """The argument of the loss that `params` is, or None if it maps names to several."""
    is_flat = isinstance(params, dict) and all(name in table or f"{name}[0]" in table for name in params)
    return ARGUMENTS if len(ARGUMENTS) == 1 and not is_flat else None


def _named(tree, arguments):
    """The leaves of a tree by the names of the plan: an argument, and the key path in it."""
    named = []
    for path, leaf in tree_flatten_with_path(tree)[0]:
        if arguments is None:
            named.append((str(path[0].key) + keystr(path[1:]), leaf))
        else:
            named.append((arguments[0] + keystr(path), leaf))
    return named


def _rows(name, leaf, table):
    """The names of the rows of a stack of layers, which the plan lays out one by one."""
    rows = [f"{name}[{row}]" for row in range(leaf.shape[0] if leaf.ndim else 0)]
    if not rows or not all(row in table for row in rows):
        raise KeyError(f"the plan has no '{name}'{_near(name, table)}")
    return rows


def _by_name(tree, arguments, table):
    """The parameters by their names in the plan. Stacks of layers are taken apart."""
    known = {}
    for name, leaf in _named(tree, arguments):
        if name in table:
            known[name] = leaf
        else:
            known |= {row: leaf[i] for i, row in enumerate(_rows(name, leaf, table))}
    return known


def _specs(tree, table, arguments):
    specs, missing = [], set(table)
    for name, leaf in _named(tree, arguments):
        if name in table:
            spec = table[name]
            missing.discard(name)
        else:
            rows = _rows(name, leaf, table)
            if any(table[row] != table[rows[0]] for row in rows):
                raise ValueError(f"the plan lays out the layers of '{name}' differently, which one array cannot have")
            spec = P(None, *table[rows[0]])
            missing -= set(rows)
        if len(spec) > leaf.ndim:
            raise ValueError(f"'{name}' has {leaf.ndim} dimensions, in the plan {len(spec)}")
        specs.append(spec)
    if missing:
        raise KeyError(f"the tree has no {', '.join(sorted(missing)[:4])}, which the plan lays out")
    return jax.tree.unflatten(jax.tree.structure(tree), specs)


def _scalar(value, dtype):
    return numpy.array(value, jnp.dtype(dtype))[()]


def _array(values, shape, dtype):
    return jnp.asarray(numpy.array(values).astype(jnp.dtype(dtype)).reshape(shape))


def _threefry(word, *operands):
    first, second = jax.extend.random.threefry2x32_p.bind(*operands)
    return {"first": first, "second": second, "xor": first ^ second}[word]


def _arg_sort(keys, descending, dim):
    """The stable permutation that sorts by several keys, the most significant first. NaN is the greatest number."""
    sorted_by = []
    for key, down in zip(keys, descending):
        key = key.astype("int8") if key.dtype == bool else key
        if not down:
            sorted_by.append(key)
        elif jnp.issubdtype(key.dtype, jnp.floating):
            sorted_by += [(~jnp.isnan(key)).astype("int8"), -key]
        else:
            sorted_by.append(~key)
    places = lax.broadcasted_iota("int32", keys[0].shape, dim)
    return lax.sort([*sorted_by, places], dimension=dim, is_stable=True, num_keys=len(sorted_by))[-1]


def _grouped_dot(x, w, group, contract):
    """The product of every row with the matrix that it selects, or zeros if there is no such matrix."""
    groups, columns = w.shape[0], w.shape[3 - contract]
    rows, chosen = x.reshape(-1, x.shape[-1]), group.reshape(-1).astype("int32")
    known = (chosen >= 0) & (chosen < groups)
    chosen = jnp.where(known, chosen, groups)
    order = jnp.argsort(chosen, stable=True)
    sizes = (chosen[:, None] == jnp.arange(groups)).sum(0).astype("int32")
    w = w if contract == 1 else jnp.swapaxes(w, 1, 2)
    product = lax.ragged_dot(rows[order], w, sizes)[jnp.argsort(order)]
    return jnp.where(known[:, None], product, 0).astype(x.dtype).reshape(*group.shape, columns)


def _select_and_scatter(operand, source, best, size, stride, padding):
    """Sends each element of `source` to the best of its window: the derivative of a window of maxima."""
    worst = numpy.array(-numpy.inf if best is lax.ge else numpy.inf, operand.dtype)[()]
    reducer = lax.max if best is lax.ge else lax.min
    _, pull = jax.vjp(lambda x: lax.reduce_window(x, worst, reducer, size, stride, padding), operand)
    return pull(source)[0]
