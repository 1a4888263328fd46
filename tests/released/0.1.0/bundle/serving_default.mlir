module @jit_serving_default attributes {jax.uses_shape_polymorphism = true, mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<i32> {jax.global_constant = "_platform_index"}, %arg1: tensor<4xf32>, %arg2: tensor<3x4xf32>, %arg3: tensor<1x1x4xf32>, %arg4: tensor<f32>, %arg5: tensor<1x1x4xf32>, %arg6: tensor<f32>, %arg7: tensor<1x1x4xf32>, %arg8: tensor<1x1x4xf32>, %arg9: tensor<2xf32>, %arg10: tensor<4x2xf32>, %arg11: tensor<?x?x3xf32>) -> (tensor<?x?x2xf32> {jax.result_info = "result['output']['output']"}) {
    %c = stablehlo.constant dense<1> : tensor<i32>
    %0 = stablehlo.get_dimension_size %arg11, dim = 0 : (tensor<?x?x3xf32>) -> tensor<i32>
    %1 = stablehlo.get_dimension_size %arg11, dim = 1 : (tensor<?x?x3xf32>) -> tensor<i32>
    %2 = stablehlo.compare GE, %0, %c, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.custom_call @shape_assertion(%2, %0) {api_version = 2 : i32, error_message = "Input shapes do not match the polymorphic shapes specification. Expected value >= 1 for dimension variable 'batch'. Using the following polymorphic shapes specifications: args[1]['x'].shape = (batch, length, 3). Obtained dimension variables: 'batch' = {0} from specification 'batch' for dimension args[1]['x'].shape[0] (= {0}), . Please see https://docs.jax.dev/en/latest/export/shape_poly.html#shape-assertion-errors for more details.", has_side_effect = true} : (tensor<i1>, tensor<i32>) -> ()
    %3 = stablehlo.compare GE, %1, %c, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.custom_call @shape_assertion(%3, %0, %1) {api_version = 2 : i32, error_message = "Input shapes do not match the polymorphic shapes specification. Expected value >= 1 for dimension variable 'length'. Using the following polymorphic shapes specifications: args[1]['x'].shape = (batch, length, 3). Obtained dimension variables: 'batch' = {0} from specification 'batch' for dimension args[1]['x'].shape[0] (= {0}), 'length' = {1} from specification 'length' for dimension args[1]['x'].shape[1] (= {1}), . Please see https://docs.jax.dev/en/latest/export/shape_poly.html#shape-assertion-errors for more details.", has_side_effect = true} : (tensor<i1>, tensor<i32>, tensor<i32>) -> ()
    %4 = call @_wrapped_jax_export_main(%arg0, %0, %1, %arg1, %arg2, %arg3, %arg4, %arg5, %arg6, %arg7, %arg8, %arg9, %arg10, %arg11) : (tensor<i32>, tensor<i32>, tensor<i32>, tensor<4xf32>, tensor<3x4xf32>, tensor<1x1x4xf32>, tensor<f32>, tensor<1x1x4xf32>, tensor<f32>, tensor<1x1x4xf32>, tensor<1x1x4xf32>, tensor<2xf32>, tensor<4x2xf32>, tensor<?x?x3xf32>) -> tensor<?x?x2xf32>
    return %4 : tensor<?x?x2xf32>
  }
  func.func private @_wrapped_jax_export_main(%arg0: tensor<i32> {jax.global_constant = "_platform_index"}, %arg1: tensor<i32> {jax.global_constant = "batch"}, %arg2: tensor<i32> {jax.global_constant = "length"}, %arg3: tensor<4xf32>, %arg4: tensor<3x4xf32>, %arg5: tensor<1x1x4xf32>, %arg6: tensor<f32>, %arg7: tensor<1x1x4xf32>, %arg8: tensor<f32>, %arg9: tensor<1x1x4xf32>, %arg10: tensor<1x1x4xf32>, %arg11: tensor<2xf32>, %arg12: tensor<4x2xf32>, %arg13: tensor<?x?x3xf32>) -> (tensor<?x?x2xf32> {jax.result_info = "result['output']['output']"}) {
    %c = stablehlo.constant dense<2> : tensor<1xi32>
    %cst = stablehlo.constant dense<9.99999974E-6> : tensor<f32>
    %c_0 = stablehlo.constant dense<4> : tensor<1xi32>
    %c_1 = stablehlo.constant dense<1> : tensor<i32>
    %c_2 = stablehlo.constant dense<2> : tensor<i32>
    %c_3 = stablehlo.constant dense<0> : tensor<i32>
    %0 = "stablehlo.case"(%arg0) ({
      stablehlo.return %c_3 : tensor<i32>
    }, {
      stablehlo.return %c_2 : tensor<i32>
    }, {
      stablehlo.return %c_2 : tensor<i32>
    }, {
      stablehlo.return %c_1 : tensor<i32>
    }) : (tensor<i32>) -> tensor<i32>
    %1 = "stablehlo.case"(%0) ({
      %36 = stablehlo.dot_general %arg13, %arg4, contracting_dims = [2] x [0] : (tensor<?x?x3xf32>, tensor<3x4xf32>) -> tensor<?x?x4xf32>
      stablehlo.return %36 : tensor<?x?x4xf32>
    }, {
      %36 = stablehlo.dot_general %arg13, %arg4, contracting_dims = [2] x [0] : (tensor<?x?x3xf32>, tensor<3x4xf32>) -> tensor<?x?x4xf32>
      stablehlo.return %36 : tensor<?x?x4xf32>
    }, {
      %36 = stablehlo.dot_general %arg13, %arg4, contracting_dims = [2] x [0] : (tensor<?x?x3xf32>, tensor<3x4xf32>) -> tensor<?x?x4xf32>
      stablehlo.return %36 : tensor<?x?x4xf32>
    }) : (tensor<i32>) -> tensor<?x?x4xf32>
    %2 = stablehlo.broadcast_in_dim %arg3, dims = [2] : (tensor<4xf32>) -> tensor<1x1x4xf32>
    %3 = stablehlo.reshape %arg1 : (tensor<i32>) -> tensor<1xi32>
    %4 = stablehlo.reshape %arg2 : (tensor<i32>) -> tensor<1xi32>
    %5 = stablehlo.concatenate %3, %4, %c_0, dim = 0 : (tensor<1xi32>, tensor<1xi32>, tensor<1xi32>) -> tensor<3xi32>
    %6 = stablehlo.dynamic_broadcast_in_dim %2, %5, dims = [0, 1, 2] : (tensor<1x1x4xf32>, tensor<3xi32>) -> tensor<?x?x4xf32>
    %7 = stablehlo.add %1, %6 : tensor<?x?x4xf32>
    %8 = call @relu(%arg0, %arg1, %arg2, %7) : (tensor<i32>, tensor<i32>, tensor<i32>, tensor<?x?x4xf32>) -> tensor<?x?x4xf32>
    %9 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<1x1x4xf32>
    %10 = stablehlo.add %arg7, %9 : tensor<1x1x4xf32>
    %11 = stablehlo.rsqrt %10 : tensor<1x1x4xf32>
    %12 = stablehlo.multiply %arg10, %11 : tensor<1x1x4xf32>
    %13 = stablehlo.reshape %arg1 : (tensor<i32>) -> tensor<1xi32>
    %14 = stablehlo.reshape %arg2 : (tensor<i32>) -> tensor<1xi32>
    %15 = stablehlo.concatenate %13, %14, %c_0, dim = 0 : (tensor<1xi32>, tensor<1xi32>, tensor<1xi32>) -> tensor<3xi32>
    %16 = stablehlo.dynamic_broadcast_in_dim %arg5, %15, dims = [0, 1, 2] : (tensor<1x1x4xf32>, tensor<3xi32>) -> tensor<?x?x4xf32>
    %17 = stablehlo.subtract %8, %16 : tensor<?x?x4xf32>
    %18 = stablehlo.reshape %arg1 : (tensor<i32>) -> tensor<1xi32>
    %19 = stablehlo.reshape %arg2 : (tensor<i32>) -> tensor<1xi32>
    %20 = stablehlo.concatenate %18, %19, %c_0, dim = 0 : (tensor<1xi32>, tensor<1xi32>, tensor<1xi32>) -> tensor<3xi32>
    %21 = stablehlo.dynamic_broadcast_in_dim %12, %20, dims = [0, 1, 2] : (tensor<1x1x4xf32>, tensor<3xi32>) -> tensor<?x?x4xf32>
    %22 = stablehlo.multiply %17, %21 : tensor<?x?x4xf32>
    %23 = stablehlo.reshape %arg1 : (tensor<i32>) -> tensor<1xi32>
    %24 = stablehlo.reshape %arg2 : (tensor<i32>) -> tensor<1xi32>
    %25 = stablehlo.concatenate %23, %24, %c_0, dim = 0 : (tensor<1xi32>, tensor<1xi32>, tensor<1xi32>) -> tensor<3xi32>
    %26 = stablehlo.dynamic_broadcast_in_dim %arg9, %25, dims = [0, 1, 2] : (tensor<1x1x4xf32>, tensor<3xi32>) -> tensor<?x?x4xf32>
    %27 = stablehlo.add %22, %26 : tensor<?x?x4xf32>
    %28 = "stablehlo.case"(%arg0) ({
      stablehlo.return %c_3 : tensor<i32>
    }, {
      stablehlo.return %c_2 : tensor<i32>
    }, {
      stablehlo.return %c_2 : tensor<i32>
    }, {
      stablehlo.return %c_1 : tensor<i32>
    }) : (tensor<i32>) -> tensor<i32>
    %29 = "stablehlo.case"(%28) ({
      %36 = stablehlo.dot_general %27, %arg12, contracting_dims = [2] x [0] : (tensor<?x?x4xf32>, tensor<4x2xf32>) -> tensor<?x?x2xf32>
      stablehlo.return %36 : tensor<?x?x2xf32>
    }, {
      %36 = stablehlo.dot_general %27, %arg12, contracting_dims = [2] x [0] : (tensor<?x?x4xf32>, tensor<4x2xf32>) -> tensor<?x?x2xf32>
      stablehlo.return %36 : tensor<?x?x2xf32>
    }, {
      %36 = stablehlo.dot_general %27, %arg12, contracting_dims = [2] x [0] : (tensor<?x?x4xf32>, tensor<4x2xf32>) -> tensor<?x?x2xf32>
      stablehlo.return %36 : tensor<?x?x2xf32>
    }) : (tensor<i32>) -> tensor<?x?x2xf32>
    %30 = stablehlo.broadcast_in_dim %arg11, dims = [2] : (tensor<2xf32>) -> tensor<1x1x2xf32>
    %31 = stablehlo.reshape %arg1 : (tensor<i32>) -> tensor<1xi32>
    %32 = stablehlo.reshape %arg2 : (tensor<i32>) -> tensor<1xi32>
    %33 = stablehlo.concatenate %31, %32, %c, dim = 0 : (tensor<1xi32>, tensor<1xi32>, tensor<1xi32>) -> tensor<3xi32>
    %34 = stablehlo.dynamic_broadcast_in_dim %30, %33, dims = [0, 1, 2] : (tensor<1x1x2xf32>, tensor<3xi32>) -> tensor<?x?x2xf32>
    %35 = stablehlo.add %29, %34 : tensor<?x?x2xf32>
    return %35 : tensor<?x?x2xf32>
  }
  func.func private @relu(%arg0: tensor<i32> {jax.global_constant = "_platform_index"}, %arg1: tensor<i32> {jax.global_constant = "batch"}, %arg2: tensor<i32> {jax.global_constant = "length"}, %arg3: tensor<?x?x4xf32>) -> tensor<?x?x4xf32> {
    %c = stablehlo.constant dense<4> : tensor<1xi32>
    %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %0 = stablehlo.reshape %arg1 : (tensor<i32>) -> tensor<1xi32>
    %1 = stablehlo.reshape %arg2 : (tensor<i32>) -> tensor<1xi32>
    %2 = stablehlo.concatenate %0, %1, %c, dim = 0 : (tensor<1xi32>, tensor<1xi32>, tensor<1xi32>) -> tensor<3xi32>
    %3 = stablehlo.dynamic_broadcast_in_dim %cst, %2, dims = [] : (tensor<f32>, tensor<3xi32>) -> tensor<?x?x4xf32>
    %4 = stablehlo.maximum %arg3, %3 : tensor<?x?x4xf32>
    return %4 : tensor<?x?x4xf32>
  }
}

