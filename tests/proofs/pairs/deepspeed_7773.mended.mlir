module @jit__lambda attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["model"=4]> {stablehlo.mesh = {axes = [{name = "model", size = 4 : i64}]}}
  func.func public @main(%arg0: tensor<12x6xf32>, %arg1: tensor<2x8x12xf32>, %arg2: tensor<2x8x6xf32>) -> (tensor<12x6xf32> {jax.result_info = "result"}) {
    %0 = sdy.manual_computation(%arg0, %arg1, %arg2) in_shardings=[<@mesh, [{}, {}]>, <@mesh, [{}, {"model"}, {}]>, <@mesh, [{}, {"model"}, {}]>] out_shardings=[<@mesh, [{}, {}]>] manual_axes={"model"} (%arg3: tensor<12x6xf32>, %arg4: tensor<2x2x12xf32>, %arg5: tensor<2x2x6xf32>) {
      %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
      %1 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<12x6xf32>
      %2 = stablehlo.slice %arg4 [0:1, 0:2, 0:12] : (tensor<2x2x12xf32>) -> tensor<1x2x12xf32>
      %3 = stablehlo.reshape %2 : (tensor<1x2x12xf32>) -> tensor<2x12xf32>
      %4 = stablehlo.dot_general %3, %arg3, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT] : (tensor<2x12xf32>, tensor<12x6xf32>) -> tensor<2x6xf32>
      %5 = stablehlo.tanh %4 : tensor<2x6xf32>
      %cst_0 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
      %6 = stablehlo.broadcast_in_dim %cst_0, dims = [] : (tensor<f32>) -> tensor<2x6xf32>
      %7 = stablehlo.subtract %6, %5 : tensor<2x6xf32>
      %8 = stablehlo.slice %arg5 [0:1, 0:2, 0:6] : (tensor<2x2x6xf32>) -> tensor<1x2x6xf32>
      %9 = stablehlo.reshape %8 : (tensor<1x2x6xf32>) -> tensor<2x6xf32>
      %10 = stablehlo.subtract %5, %9 : tensor<2x6xf32>
      %cst_1 = stablehlo.constant dense<2.000000e+00> : tensor<f32>
      %11 = stablehlo.broadcast_in_dim %cst_1, dims = [] : (tensor<f32>) -> tensor<2x6xf32>
      %12 = stablehlo.multiply %11, %10 : tensor<2x6xf32>
      %cst_2 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
      %cst_3 = stablehlo.constant dense<1.200000e+01> : tensor<f32>
      %13 = stablehlo.divide %cst_2, %cst_3 : tensor<f32>
      %14 = stablehlo.broadcast_in_dim %13, dims = [] : (tensor<f32>) -> tensor<2x6xf32>
      %15 = stablehlo.multiply %14, %12 : tensor<2x6xf32>
      %16 = stablehlo.multiply %15, %7 : tensor<2x6xf32>
      %17 = stablehlo.multiply %16, %5 : tensor<2x6xf32>
      %18 = stablehlo.add %16, %17 : tensor<2x6xf32>
      %19 = stablehlo.dot_general %18, %3, contracting_dims = [0] x [0], precision = [DEFAULT, DEFAULT] : (tensor<2x6xf32>, tensor<2x12xf32>) -> tensor<6x12xf32>
      %20 = stablehlo.transpose %19, dims = [1, 0] : (tensor<6x12xf32>) -> tensor<12x6xf32>
      %21 = "stablehlo.all_reduce"(%20) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids}> ({
      ^bb0(%arg6: tensor<f32>, %arg7: tensor<f32>):
        %53 = stablehlo.add %arg6, %arg7 : tensor<f32>
        stablehlo.return %53 : tensor<f32>
      }) : (tensor<12x6xf32>) -> tensor<12x6xf32>
      %cst_4 = stablehlo.constant dense<4.000000e+00> : tensor<f32>
      %22 = stablehlo.broadcast_in_dim %cst_4, dims = [] : (tensor<f32>) -> tensor<12x6xf32>
      %23 = stablehlo.divide %21, %22 : tensor<12x6xf32>
      %24 = stablehlo.add %1, %23 : tensor<12x6xf32>
      %25 = stablehlo.slice %arg4 [1:2, 0:2, 0:12] : (tensor<2x2x12xf32>) -> tensor<1x2x12xf32>
      %26 = stablehlo.reshape %25 : (tensor<1x2x12xf32>) -> tensor<2x12xf32>
      %27 = stablehlo.dot_general %26, %arg3, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT] : (tensor<2x12xf32>, tensor<12x6xf32>) -> tensor<2x6xf32>
      %28 = stablehlo.tanh %27 : tensor<2x6xf32>
      %cst_5 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
      %29 = stablehlo.broadcast_in_dim %cst_5, dims = [] : (tensor<f32>) -> tensor<2x6xf32>
      %30 = stablehlo.subtract %29, %28 : tensor<2x6xf32>
      %31 = stablehlo.slice %arg5 [1:2, 0:2, 0:6] : (tensor<2x2x6xf32>) -> tensor<1x2x6xf32>
      %32 = stablehlo.reshape %31 : (tensor<1x2x6xf32>) -> tensor<2x6xf32>
      %33 = stablehlo.subtract %28, %32 : tensor<2x6xf32>
      %cst_6 = stablehlo.constant dense<2.000000e+00> : tensor<f32>
      %34 = stablehlo.broadcast_in_dim %cst_6, dims = [] : (tensor<f32>) -> tensor<2x6xf32>
      %35 = stablehlo.multiply %34, %33 : tensor<2x6xf32>
      %cst_7 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
      %cst_8 = stablehlo.constant dense<1.200000e+01> : tensor<f32>
      %36 = stablehlo.divide %cst_7, %cst_8 : tensor<f32>
      %37 = stablehlo.broadcast_in_dim %36, dims = [] : (tensor<f32>) -> tensor<2x6xf32>
      %38 = stablehlo.multiply %37, %35 : tensor<2x6xf32>
      %39 = stablehlo.multiply %38, %30 : tensor<2x6xf32>
      %40 = stablehlo.multiply %39, %28 : tensor<2x6xf32>
      %41 = stablehlo.add %39, %40 : tensor<2x6xf32>
      %42 = stablehlo.dot_general %41, %26, contracting_dims = [0] x [0], precision = [DEFAULT, DEFAULT] : (tensor<2x6xf32>, tensor<2x12xf32>) -> tensor<6x12xf32>
      %43 = stablehlo.transpose %42, dims = [1, 0] : (tensor<6x12xf32>) -> tensor<12x6xf32>
      %44 = "stablehlo.all_reduce"(%43) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids}> ({
      ^bb0(%arg6: tensor<f32>, %arg7: tensor<f32>):
        %53 = stablehlo.add %arg6, %arg7 : tensor<f32>
        stablehlo.return %53 : tensor<f32>
      }) : (tensor<12x6xf32>) -> tensor<12x6xf32>
      %cst_9 = stablehlo.constant dense<4.000000e+00> : tensor<f32>
      %45 = stablehlo.broadcast_in_dim %cst_9, dims = [] : (tensor<f32>) -> tensor<12x6xf32>
      %46 = stablehlo.divide %44, %45 : tensor<12x6xf32>
      %47 = stablehlo.add %24, %46 : tensor<12x6xf32>
      %cst_10 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
      %48 = stablehlo.broadcast_in_dim %cst_10, dims = [] : (tensor<f32>) -> tensor<12x6xf32>
      %49 = stablehlo.multiply %48, %47 : tensor<12x6xf32>
      %cst_11 = stablehlo.constant dense<5.000000e-01> : tensor<f32>
      %50 = stablehlo.broadcast_in_dim %cst_11, dims = [] : (tensor<f32>) -> tensor<12x6xf32>
      %51 = stablehlo.multiply %49, %50 : tensor<12x6xf32>
      %52 = stablehlo.subtract %arg3, %51 : tensor<12x6xf32>
      sdy.return %52 : tensor<12x6xf32>
    } : (tensor<12x6xf32>, tensor<2x8x12xf32>, tensor<2x8x6xf32>) -> tensor<12x6xf32>
    return %0 : tensor<12x6xf32>
  }
}
