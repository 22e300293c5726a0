module github.com/kpng-project/kpng/test/cluster/parts/pause

go 1.24
