module @jit_step attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<16xf32>, %arg1: tensor<12x8xf32>, %arg2: tensor<16x4xf32>, %arg3: tensor<8x16xf32>, %arg4: tensor<i32>, %arg5: tensor<16xf32>, %arg6: tensor<16x4xf32>, %arg7: tensor<8x16xf32>, %arg8: tensor<16xf32>, %arg9: tensor<16x4xf32>, %arg10: tensor<8x16xf32>, %arg11: tensor<i32>, %arg12: tensor<8x12xf32>, %arg13: tensor<8x4xf32>) -> (tensor<16xf32> {jax.result_info = "result[0]['b']"}, tensor<12x8xf32> {jax.result_info = "result[0]['emb']"}, tensor<16x4xf32> {jax.result_info = "result[0]['o']"}, tensor<8x16xf32> {jax.result_info = "result[0]['w']"}, tensor<i32> {jax.result_info = "result[1].inner_states['t'].inner_state[1][0].count"}, tensor<16xf32> {jax.result_info = "result[1].inner_states['t'].inner_state[1][0].mu['b']"}, tensor<16x4xf32> {jax.result_info = "result[1].inner_states['t'].inner_state[1][0].mu['o']"}, tensor<8x16xf32> {jax.result_info = "result[1].inner_states['t'].inner_state[1][0].mu['w']"}, tensor<16xf32> {jax.result_info = "result[1].inner_states['t'].inner_state[1][0].nu['b']"}, tensor<16x4xf32> {jax.result_info = "result[1].inner_states['t'].inner_state[1][0].nu['o']"}, tensor<8x16xf32> {jax.result_info = "result[1].inner_states['t'].inner_state[1][0].nu['w']"}, tensor<i32> {jax.result_info = "result[1].inner_states['t'].inner_state[1][2].count"}, tensor<f32> {jax.result_info = "result[2]"}) {
    %0 = stablehlo.dot_general %arg12, %arg1, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT] : (tensor<8x12xf32>, tensor<12x8xf32>) -> tensor<8x8xf32>
    %1 = stablehlo.dot_general %0, %arg3, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT] : (tensor<8x8xf32>, tensor<8x16xf32>) -> tensor<8x16xf32>
    %2 = stablehlo.broadcast_in_dim %arg0, dims = [1] : (tensor<16xf32>) -> tensor<1x16xf32>
    %3 = stablehlo.broadcast_in_dim %2, dims = [0, 1] : (tensor<1x16xf32>) -> tensor<8x16xf32>
    %4 = stablehlo.add %1, %3 : tensor<8x16xf32>
    %5 = stablehlo.tanh %4 : tensor<8x16xf32>
    %cst = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %6 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<8x16xf32>
    %7 = stablehlo.subtract %6, %5 : tensor<8x16xf32>
    %8 = stablehlo.dot_general %5, %arg2, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT] : (tensor<8x16xf32>, tensor<16x4xf32>) -> tensor<8x4xf32>
    %9 = stablehlo.subtract %8, %arg13 : tensor<8x4xf32>
    %10 = stablehlo.multiply %9, %9 : tensor<8x4xf32>
    %cst_0 = stablehlo.constant dense<2.000000e+00> : tensor<f32>
    %11 = stablehlo.broadcast_in_dim %cst_0, dims = [] : (tensor<f32>) -> tensor<8x4xf32>
    %12 = stablehlo.multiply %11, %9 : tensor<8x4xf32>
    %cst_1 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %13 = stablehlo.reduce(%10 init: %cst_1) applies stablehlo.add across dimensions = [0, 1] : (tensor<8x4xf32>, tensor<f32>) -> tensor<f32>
    %cst_2 = stablehlo.constant dense<3.200000e+01> : tensor<f32>
    %14 = stablehlo.divide %13, %cst_2 : tensor<f32>
    %cst_3 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %cst_4 = stablehlo.constant dense<3.200000e+01> : tensor<f32>
    %15 = stablehlo.divide %cst_3, %cst_4 : tensor<f32>
    %16 = stablehlo.broadcast_in_dim %15, dims = [] : (tensor<f32>) -> tensor<8x4xf32>
    %17 = stablehlo.multiply %16, %12 : tensor<8x4xf32>
    %18 = stablehlo.dot_general %17, %5, contracting_dims = [0] x [0], precision = [DEFAULT, DEFAULT] : (tensor<8x4xf32>, tensor<8x16xf32>) -> tensor<4x16xf32>
    %19 = stablehlo.transpose %18, dims = [1, 0] : (tensor<4x16xf32>) -> tensor<16x4xf32>
    %20 = stablehlo.dot_general %17, %arg2, contracting_dims = [1] x [1], precision = [DEFAULT, DEFAULT] : (tensor<8x4xf32>, tensor<16x4xf32>) -> tensor<8x16xf32>
    %21 = stablehlo.multiply %20, %7 : tensor<8x16xf32>
    %22 = stablehlo.multiply %21, %5 : tensor<8x16xf32>
    %23 = stablehlo.add %21, %22 : tensor<8x16xf32>
    %cst_5 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %24 = stablehlo.reduce(%23 init: %cst_5) applies stablehlo.add across dimensions = [0] : (tensor<8x16xf32>, tensor<f32>) -> tensor<16xf32>
    %25 = stablehlo.reshape %24 : (tensor<16xf32>) -> tensor<1x16xf32>
    %cst_6 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %26 = stablehlo.reduce(%25 init: %cst_6) applies stablehlo.add across dimensions = [0] : (tensor<1x16xf32>, tensor<f32>) -> tensor<16xf32>
    %27 = stablehlo.dot_general %23, %0, contracting_dims = [0] x [0], precision = [DEFAULT, DEFAULT] : (tensor<8x16xf32>, tensor<8x8xf32>) -> tensor<16x8xf32>
    %28 = stablehlo.transpose %27, dims = [1, 0] : (tensor<16x8xf32>) -> tensor<8x16xf32>
    %29 = chlo.square %26 : tensor<16xf32> -> tensor<16xf32>
    %cst_7 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %30 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<16xf32>
    %31 = chlo.square %30 : tensor<16xf32> -> tensor<16xf32>
    %32 = stablehlo.add %29, %31 : tensor<16xf32>
    %33 = chlo.square %19 : tensor<16x4xf32> -> tensor<16x4xf32>
    %cst_8 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %34 = stablehlo.broadcast_in_dim %cst_8, dims = [] : (tensor<f32>) -> tensor<16x4xf32>
    %35 = chlo.square %34 : tensor<16x4xf32> -> tensor<16x4xf32>
    %36 = stablehlo.add %33, %35 : tensor<16x4xf32>
    %37 = chlo.square %28 : tensor<8x16xf32> -> tensor<8x16xf32>
    %cst_9 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %38 = stablehlo.broadcast_in_dim %cst_9, dims = [] : (tensor<f32>) -> tensor<8x16xf32>
    %39 = chlo.square %38 : tensor<8x16xf32> -> tensor<8x16xf32>
    %40 = stablehlo.add %37, %39 : tensor<8x16xf32>
    %cst_10 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %41 = stablehlo.reduce(%32 init: %cst_10) applies stablehlo.add across dimensions = [0] : (tensor<16xf32>, tensor<f32>) -> tensor<f32>
    %cst_11 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %42 = stablehlo.reduce(%36 init: %cst_11) applies stablehlo.add across dimensions = [0, 1] : (tensor<16x4xf32>, tensor<f32>) -> tensor<f32>
    %cst_12 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %43 = stablehlo.reduce(%40 init: %cst_12) applies stablehlo.add across dimensions = [0, 1] : (tensor<8x16xf32>, tensor<f32>) -> tensor<f32>
    %cst_13 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %44 = stablehlo.add %cst_13, %41 : tensor<f32>
    %45 = stablehlo.add %44, %42 : tensor<f32>
    %46 = stablehlo.add %45, %43 : tensor<f32>
    %47 = stablehlo.sqrt %46 : tensor<f32>
    %cst_14 = stablehlo.constant dense<5.000000e-01> : tensor<f32>
    %48 = stablehlo.compare LT, %47, %cst_14, FLOAT : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %49 = stablehlo.broadcast_in_dim %47, dims = [] : (tensor<f32>) -> tensor<16xf32>
    %50 = stablehlo.divide %26, %49 : tensor<16xf32>
    %cst_15 = stablehlo.constant dense<5.000000e-01> : tensor<f32>
    %51 = stablehlo.broadcast_in_dim %cst_15, dims = [] : (tensor<f32>) -> tensor<16xf32>
    %52 = stablehlo.multiply %50, %51 : tensor<16xf32>
    %53 = stablehlo.select %48, %26, %52 : tensor<i1>, tensor<16xf32>
    %54 = stablehlo.broadcast_in_dim %47, dims = [] : (tensor<f32>) -> tensor<16x4xf32>
    %55 = stablehlo.divide %19, %54 : tensor<16x4xf32>
    %cst_16 = stablehlo.constant dense<5.000000e-01> : tensor<f32>
    %56 = stablehlo.broadcast_in_dim %cst_16, dims = [] : (tensor<f32>) -> tensor<16x4xf32>
    %57 = stablehlo.multiply %55, %56 : tensor<16x4xf32>
    %58 = stablehlo.select %48, %19, %57 : tensor<i1>, tensor<16x4xf32>
    %59 = stablehlo.broadcast_in_dim %47, dims = [] : (tensor<f32>) -> tensor<8x16xf32>
    %60 = stablehlo.divide %28, %59 : tensor<8x16xf32>
    %cst_17 = stablehlo.constant dense<5.000000e-01> : tensor<f32>
    %61 = stablehlo.broadcast_in_dim %cst_17, dims = [] : (tensor<f32>) -> tensor<8x16xf32>
    %62 = stablehlo.multiply %60, %61 : tensor<8x16xf32>
    %63 = stablehlo.select %48, %28, %62 : tensor<i1>, tensor<8x16xf32>
    %cst_18 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
    %64 = stablehlo.broadcast_in_dim %cst_18, dims = [] : (tensor<f32>) -> tensor<16xf32>
    %65 = stablehlo.multiply %64, %53 : tensor<16xf32>
    %cst_19 = stablehlo.constant dense<0.899999976> : tensor<f32>
    %66 = stablehlo.broadcast_in_dim %cst_19, dims = [] : (tensor<f32>) -> tensor<16xf32>
    %67 = stablehlo.multiply %66, %arg5 : tensor<16xf32>
    %68 = stablehlo.add %65, %67 : tensor<16xf32>
    %cst_20 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
    %69 = stablehlo.broadcast_in_dim %cst_20, dims = [] : (tensor<f32>) -> tensor<16x4xf32>
    %70 = stablehlo.multiply %69, %58 : tensor<16x4xf32>
    %cst_21 = stablehlo.constant dense<0.899999976> : tensor<f32>
    %71 = stablehlo.broadcast_in_dim %cst_21, dims = [] : (tensor<f32>) -> tensor<16x4xf32>
    %72 = stablehlo.multiply %71, %arg6 : tensor<16x4xf32>
    %73 = stablehlo.add %70, %72 : tensor<16x4xf32>
    %cst_22 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
    %74 = stablehlo.broadcast_in_dim %cst_22, dims = [] : (tensor<f32>) -> tensor<8x16xf32>
    %75 = stablehlo.multiply %74, %63 : tensor<8x16xf32>
    %cst_23 = stablehlo.constant dense<0.899999976> : tensor<f32>
    %76 = stablehlo.broadcast_in_dim %cst_23, dims = [] : (tensor<f32>) -> tensor<8x16xf32>
    %77 = stablehlo.multiply %76, %arg7 : tensor<8x16xf32>
    %78 = stablehlo.add %75, %77 : tensor<8x16xf32>
    %79 = stablehlo.multiply %53, %53 : tensor<16xf32>
    %cst_24 = stablehlo.constant dense<5.000000e-02> : tensor<f32>
    %80 = stablehlo.broadcast_in_dim %cst_24, dims = [] : (tensor<f32>) -> tensor<16xf32>
    %81 = stablehlo.multiply %80, %79 : tensor<16xf32>
    %cst_25 = stablehlo.constant dense<0.949999988> : tensor<f32>
    %82 = stablehlo.broadcast_in_dim %cst_25, dims = [] : (tensor<f32>) -> tensor<16xf32>
    %83 = stablehlo.multiply %82, %arg8 : tensor<16xf32>
    %84 = stablehlo.add %81, %83 : tensor<16xf32>
    %85 = stablehlo.multiply %58, %58 : tensor<16x4xf32>
    %cst_26 = stablehlo.constant dense<5.000000e-02> : tensor<f32>
    %86 = stablehlo.broadcast_in_dim %cst_26, dims = [] : (tensor<f32>) -> tensor<16x4xf32>
    %87 = stablehlo.multiply %86, %85 : tensor<16x4xf32>
    %cst_27 = stablehlo.constant dense<0.949999988> : tensor<f32>
    %88 = stablehlo.broadcast_in_dim %cst_27, dims = [] : (tensor<f32>) -> tensor<16x4xf32>
    %89 = stablehlo.multiply %88, %arg9 : tensor<16x4xf32>
    %90 = stablehlo.add %87, %89 : tensor<16x4xf32>
    %91 = stablehlo.multiply %63, %63 : tensor<8x16xf32>
    %cst_28 = stablehlo.constant dense<5.000000e-02> : tensor<f32>
    %92 = stablehlo.broadcast_in_dim %cst_28, dims = [] : (tensor<f32>) -> tensor<8x16xf32>
    %93 = stablehlo.multiply %92, %91 : tensor<8x16xf32>
    %cst_29 = stablehlo.constant dense<0.949999988> : tensor<f32>
    %94 = stablehlo.broadcast_in_dim %cst_29, dims = [] : (tensor<f32>) -> tensor<8x16xf32>
    %95 = stablehlo.multiply %94, %arg10 : tensor<8x16xf32>
    %96 = stablehlo.add %93, %95 : tensor<8x16xf32>
    %c = stablehlo.constant dense<2147483647> : tensor<i32>
    %97 = stablehlo.compare LT, %arg4, %c, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %c_30 = stablehlo.constant dense<1> : tensor<i32>
    %98 = stablehlo.add %arg4, %c_30 : tensor<i32>
    %c_31 = stablehlo.constant dense<2147483647> : tensor<i32>
    %99 = call @_where(%97, %98, %c_31) : (tensor<i1>, tensor<i32>, tensor<i32>) -> tensor<i32>
    %cst_32 = stablehlo.constant dense<0.899999976> : tensor<f32>
    %100 = stablehlo.convert %99 : (tensor<i32>) -> tensor<f32>
    %101 = stablehlo.power %cst_32, %100 : tensor<f32>
    %cst_33 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %102 = stablehlo.subtract %cst_33, %101 : tensor<f32>
    %103 = stablehlo.broadcast_in_dim %102, dims = [] : (tensor<f32>) -> tensor<16xf32>
    %104 = stablehlo.divide %68, %103 : tensor<16xf32>
    %105 = stablehlo.broadcast_in_dim %102, dims = [] : (tensor<f32>) -> tensor<16x4xf32>
    %106 = stablehlo.divide %73, %105 : tensor<16x4xf32>
    %107 = stablehlo.broadcast_in_dim %102, dims = [] : (tensor<f32>) -> tensor<8x16xf32>
    %108 = stablehlo.divide %78, %107 : tensor<8x16xf32>
    %cst_34 = stablehlo.constant dense<0.949999988> : tensor<f32>
    %109 = stablehlo.convert %99 : (tensor<i32>) -> tensor<f32>
    %110 = stablehlo.power %cst_34, %109 : tensor<f32>
    %cst_35 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %111 = stablehlo.subtract %cst_35, %110 : tensor<f32>
    %112 = stablehlo.broadcast_in_dim %111, dims = [] : (tensor<f32>) -> tensor<16xf32>
    %113 = stablehlo.divide %84, %112 : tensor<16xf32>
    %114 = stablehlo.broadcast_in_dim %111, dims = [] : (tensor<f32>) -> tensor<16x4xf32>
    %115 = stablehlo.divide %90, %114 : tensor<16x4xf32>
    %116 = stablehlo.broadcast_in_dim %111, dims = [] : (tensor<f32>) -> tensor<8x16xf32>
    %117 = stablehlo.divide %96, %116 : tensor<8x16xf32>
    %cst_36 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %118 = stablehlo.broadcast_in_dim %cst_36, dims = [] : (tensor<f32>) -> tensor<16xf32>
    %119 = stablehlo.add %113, %118 : tensor<16xf32>
    %120 = stablehlo.sqrt %119 : tensor<16xf32>
    %cst_37 = stablehlo.constant dense<9.99999993E-9> : tensor<f32>
    %121 = stablehlo.broadcast_in_dim %cst_37, dims = [] : (tensor<f32>) -> tensor<16xf32>
    %122 = stablehlo.add %120, %121 : tensor<16xf32>
    %123 = stablehlo.divide %104, %122 : tensor<16xf32>
    %cst_38 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %124 = stablehlo.broadcast_in_dim %cst_38, dims = [] : (tensor<f32>) -> tensor<16x4xf32>
    %125 = stablehlo.add %115, %124 : tensor<16x4xf32>
    %126 = stablehlo.sqrt %125 : tensor<16x4xf32>
    %cst_39 = stablehlo.constant dense<9.99999993E-9> : tensor<f32>
    %127 = stablehlo.broadcast_in_dim %cst_39, dims = [] : (tensor<f32>) -> tensor<16x4xf32>
    %128 = stablehlo.add %126, %127 : tensor<16x4xf32>
    %129 = stablehlo.divide %106, %128 : tensor<16x4xf32>
    %cst_40 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %130 = stablehlo.broadcast_in_dim %cst_40, dims = [] : (tensor<f32>) -> tensor<8x16xf32>
    %131 = stablehlo.add %117, %130 : tensor<8x16xf32>
    %132 = stablehlo.sqrt %131 : tensor<8x16xf32>
    %cst_41 = stablehlo.constant dense<9.99999993E-9> : tensor<f32>
    %133 = stablehlo.broadcast_in_dim %cst_41, dims = [] : (tensor<f32>) -> tensor<8x16xf32>
    %134 = stablehlo.add %132, %133 : tensor<8x16xf32>
    %135 = stablehlo.divide %108, %134 : tensor<8x16xf32>
    %cst_42 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
    %136 = stablehlo.broadcast_in_dim %cst_42, dims = [] : (tensor<f32>) -> tensor<16x4xf32>
    %137 = stablehlo.multiply %136, %arg2 : tensor<16x4xf32>
    %138 = stablehlo.add %129, %137 : tensor<16x4xf32>
    %cst_43 = stablehlo.constant dense<1.000000e-01> : tensor<f32>
    %139 = stablehlo.broadcast_in_dim %cst_43, dims = [] : (tensor<f32>) -> tensor<8x16xf32>
    %140 = stablehlo.multiply %139, %arg3 : tensor<8x16xf32>
    %141 = stablehlo.add %135, %140 : tensor<8x16xf32>
    %c_44 = stablehlo.constant dense<0> : tensor<i32>
    %142 = stablehlo.subtract %arg11, %c_44 : tensor<i32>
    %c_45 = stablehlo.constant dense<0> : tensor<i32>
    %c_46 = stablehlo.constant dense<10> : tensor<i32>
    %143 = call @clip(%142, %c_45, %c_46) : (tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<i32>
    %144 = stablehlo.convert %143 : (tensor<i32>) -> tensor<f32>
    %cst_47 = stablehlo.constant dense<1.000000e+01> : tensor<f32>
    %145 = stablehlo.divide %144, %cst_47 : tensor<f32>
    %cst_48 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %146 = stablehlo.subtract %cst_48, %145 : tensor<f32>
    %cst_49 = stablehlo.constant dense<-1.000000e-03> : tensor<f32>
    %147 = stablehlo.multiply %cst_49, %146 : tensor<f32>
    %cst_50 = stablehlo.constant dense<1.000000e-03> : tensor<f32>
    %148 = stablehlo.add %147, %cst_50 : tensor<f32>
    %c_51 = stablehlo.constant dense<10> : tensor<i32>
    %149 = stablehlo.compare LT, %arg11, %c_51, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %c_52 = stablehlo.constant dense<10> : tensor<i32>
    %150 = stablehlo.subtract %arg11, %c_52 : tensor<i32>
    %151 = stablehlo.convert %150 : (tensor<i32>) -> tensor<f32>
    %cst_53 = stablehlo.constant dense<9.000000e+01> : tensor<f32>
    %152 = stablehlo.minimum %151, %cst_53 : tensor<f32>
    %cst_54 = stablehlo.constant dense<3.14159274> : tensor<f32>
    %153 = stablehlo.multiply %cst_54, %152 : tensor<f32>
    %cst_55 = stablehlo.constant dense<9.000000e+01> : tensor<f32>
    %154 = stablehlo.divide %153, %cst_55 : tensor<f32>
    %155 = stablehlo.cosine %154 : tensor<f32>
    %cst_56 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %156 = stablehlo.add %cst_56, %155 : tensor<f32>
    %cst_57 = stablehlo.constant dense<5.000000e-01> : tensor<f32>
    %157 = stablehlo.multiply %cst_57, %156 : tensor<f32>
    %cst_58 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %158 = stablehlo.power %157, %cst_58 : tensor<f32>
    %cst_59 = stablehlo.constant dense<9.900000e-01> : tensor<f32>
    %159 = stablehlo.multiply %cst_59, %158 : tensor<f32>
    %cst_60 = stablehlo.constant dense<0.00999999977> : tensor<f32>
    %160 = stablehlo.add %159, %cst_60 : tensor<f32>
    %cst_61 = stablehlo.constant dense<1.000000e-03> : tensor<f32>
    %161 = stablehlo.multiply %cst_61, %160 : tensor<f32>
    %162 = call @_where_0(%149, %148, %161) : (tensor<i1>, tensor<f32>, tensor<f32>) -> tensor<f32>
    %cst_62 = stablehlo.constant dense<-1.000000e+00> : tensor<f32>
    %163 = stablehlo.multiply %cst_62, %162 : tensor<f32>
    %164 = stablehlo.broadcast_in_dim %163, dims = [] : (tensor<f32>) -> tensor<16xf32>
    %165 = stablehlo.multiply %164, %123 : tensor<16xf32>
    %166 = stablehlo.broadcast_in_dim %163, dims = [] : (tensor<f32>) -> tensor<16x4xf32>
    %167 = stablehlo.multiply %166, %138 : tensor<16x4xf32>
    %168 = stablehlo.broadcast_in_dim %163, dims = [] : (tensor<f32>) -> tensor<8x16xf32>
    %169 = stablehlo.multiply %168, %141 : tensor<8x16xf32>
    %c_63 = stablehlo.constant dense<2147483647> : tensor<i32>
    %170 = stablehlo.compare LT, %arg11, %c_63, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %c_64 = stablehlo.constant dense<1> : tensor<i32>
    %171 = stablehlo.add %arg11, %c_64 : tensor<i32>
    %c_65 = stablehlo.constant dense<2147483647> : tensor<i32>
    %172 = call @_where(%170, %171, %c_65) : (tensor<i1>, tensor<i32>, tensor<i32>) -> tensor<i32>
    %cst_66 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %173 = stablehlo.broadcast_in_dim %cst_66, dims = [] : (tensor<f32>) -> tensor<12x8xf32>
    %174 = stablehlo.add %arg0, %165 : tensor<16xf32>
    %175 = stablehlo.add %arg1, %173 : tensor<12x8xf32>
    %176 = stablehlo.add %arg2, %167 : tensor<16x4xf32>
    %177 = stablehlo.add %arg3, %169 : tensor<8x16xf32>
    return %174, %175, %176, %177, %99, %68, %73, %78, %84, %90, %96, %172, %14 : tensor<16xf32>, tensor<12x8xf32>, tensor<16x4xf32>, tensor<8x16xf32>, tensor<i32>, tensor<16xf32>, tensor<16x4xf32>, tensor<8x16xf32>, tensor<16xf32>, tensor<16x4xf32>, tensor<8x16xf32>, tensor<i32>, tensor<f32>
  }
  func.func private @_where(%arg0: tensor<i1>, %arg1: tensor<i32>, %arg2: tensor<i32>) -> tensor<i32> {
    %0 = stablehlo.select %arg0, %arg1, %arg2 : tensor<i1>, tensor<i32>
    return %0 : tensor<i32>
  }
  func.func private @clip(%arg0: tensor<i32>, %arg1: tensor<i32>, %arg2: tensor<i32>) -> tensor<i32> {
    %0 = stablehlo.convert %arg1 : tensor<i32>
    %1 = stablehlo.maximum %0, %arg0 : tensor<i32>
    %2 = stablehlo.convert %arg2 : tensor<i32>
    %3 = stablehlo.minimum %2, %1 : tensor<i32>
    return %3 : tensor<i32>
  }
  func.func private @_where_0(%arg0: tensor<i1>, %arg1: tensor<f32>, %arg2: tensor<f32>) -> tensor<f32> {
    %0 = stablehlo.convert %arg2 : tensor<f32>
    %1 = stablehlo.select %arg0, %arg1, %0 : tensor<i1>, tensor<f32>
    return %1 : tensor<f32>
  }
}
