// SPDX-License-Identifier: Apache-2.0

// Command protogen generates Go code from .proto files without protoc. Its arguments are
// paths relative to the working directory, which is the root of the module. It writes the
// code of each file to the folder that the file's option go_package names. The flag
// -plugins names the folder with protoc-gen-go and protoc-gen-go-grpc.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/bufbuild/protocompile"
	"github.com/bufbuild/protocompile/protoutil"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/pluginpb"
)

func main() {
	plugins := flag.String("plugins", ".", "`folder` of the plugins")
	flag.Parse()
	if err := run(context.Background(), *plugins, flag.Args()); err != nil {
		fmt.Fprintf(os.Stderr, "protogen: %v\n", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, plugins string, files []string) error {
	compiler := protocompile.Compiler{
		Resolver:       protocompile.WithStandardImports(&protocompile.SourceResolver{}),
		SourceInfoMode: protocompile.SourceInfoStandard,
	}
	compiled, err := compiler.Compile(ctx, files...)
	if err != nil {
		return err
	}
	request := &pluginpb.CodeGeneratorRequest{FileToGenerate: files, Parameter: proto.String("module=github.com/kpng-project/kpng")}
	seen := map[string]bool{}
	for _, file := range compiled {
		request.ProtoFile = appendFile(request.ProtoFile, seen, file)
	}
	for _, plugin := range []string{"protoc-gen-go", "protoc-gen-go-grpc"} {
		if err := generate(ctx, filepath.Join(plugins, plugin), request); err != nil {
			return fmt.Errorf("%s: %w", plugin, err)
		}
	}
	return nil
}

// appendFile appends the files that file imports, and then file itself.
func appendFile(list []*descriptorpb.FileDescriptorProto, seen map[string]bool, file protoreflect.FileDescriptor) []*descriptorpb.FileDescriptorProto {
	if seen[file.Path()] {
		return list
	}
	seen[file.Path()] = true
	for imports, i := file.Imports(), 0; i < imports.Len(); i++ {
		list = appendFile(list, seen, imports.Get(i).FileDescriptor)
	}
	return append(list, protoutil.ProtoFromFileDescriptor(file))
}

// generate runs plugin with request and writes the resulting files.
func generate(ctx context.Context, plugin string, request *pluginpb.CodeGeneratorRequest) error {
	in, err := proto.Marshal(request)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, plugin)
	cmd.Stdin, cmd.Stderr = bytes.NewReader(in), os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return err
	}
	var response pluginpb.CodeGeneratorResponse
	if err := proto.Unmarshal(out, &response); err != nil {
		return err
	}
	if response.Error != nil {
		return errors.New(response.GetError())
	}
	for _, file := range response.File {
		if err := os.WriteFile(file.GetName(), []byte(file.GetContent()), 0o644); err != nil {
			return err
		}
	}
	return nil
}
